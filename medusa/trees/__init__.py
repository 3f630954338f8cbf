"""Candidate trees: their shape, and which shape pays where."""
