"""The modules that guess: Medusa heads and an EAGLE-3 head, with their files and their calibration."""
