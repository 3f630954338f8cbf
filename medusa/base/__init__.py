"""The base model: hidden states, tree attention, and the key-value cache."""
