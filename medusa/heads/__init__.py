"""The modules that guess: Medusa heads, EAGLE-3 heads, layers that bases come with; their files and their
calibration."""
