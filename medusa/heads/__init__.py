"""The modules that guess: Medusa heads and an EAGLE-style head, with their files and their calibration."""
