"""Parts of the measuring commands: timing, comparing, choosing trees, tables and plots."""
