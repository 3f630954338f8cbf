"""What the programs in ``inference/`` are made of: timing, comparing, choosing trees, tables and plots."""
