"""The modules that guess: Medusa heads, an EAGLE-3 head and layers that bases come with; their files and their
calibration."""
