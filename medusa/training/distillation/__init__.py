"""The base model's own answers, as training data."""
