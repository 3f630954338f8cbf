"""A training run: the loop, its processes, its directory, its result."""
