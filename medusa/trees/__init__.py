"""Candidate trees: their shape, the best shape for counted ranks, and the fastest size on a machine."""
