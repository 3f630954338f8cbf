"""The kinds of training, one file each."""
