"""The base model: its hidden states and logits, tree attention, and the key-value cache.

The model is used through its public interface and stays as it is. Models in which a tree cannot be verified
exactly are refused here, with the reason.
"""
