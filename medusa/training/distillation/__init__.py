"""Self-distillation: the base model's own answers as training data."""
