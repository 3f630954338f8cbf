"""A training run: the loop, its processes, its directory and its result."""
