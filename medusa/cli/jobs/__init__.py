"""The commands that take minutes: training, distilling, tuning, and everything that measures.

The programs in train/ and inference/ are other doors to them.
"""
