"""The kinds of training: heads on a frozen base, and heads with an adapter on it."""
