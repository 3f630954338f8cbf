"""What the programs in ``inference/`` are made of: timing, comparing, choosing trees, tables and plots.

Nothing that decodes depends on this. It reads :mod:`medusa.decoding.statistics` and
:mod:`medusa.heads.calibration`.
"""
