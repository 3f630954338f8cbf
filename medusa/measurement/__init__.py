"""What the commands that measure are made of: timing, comparing, choosing trees, tables and plots."""
