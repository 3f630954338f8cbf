"""What the programs in ``inference/`` are made of: timing, comparing, choosing trees, tables and plots.

Nothing that decodes depends on this. It reads :mod:`medusa.statistics` and :mod:`medusa.calibration`.
"""
