"""The options of a training run, and how a YAML file and the command line fill them."""
