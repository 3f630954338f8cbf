"""The modules that guess: Medusa heads, an EAGLE-style head, their files and their calibration."""
