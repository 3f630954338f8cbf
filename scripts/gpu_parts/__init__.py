"""What scripts/on_gpu.py runs: one module for each part, with its cases, its measurements and its tables.

``PART`` of a module is all that the program takes from it. All parts share :mod:`gpu_parts.lab`; none imports
another.
"""
