"""Training heads on a frozen base model: what `medusa train` and `medusa distill` are made of.

The path of the data through the folders: ``distillation`` lets the base model answer prompts, ``data`` turns
conversations into micro-batches, ``states`` gives the base's hidden states for them, live or stored,
``losses`` has the losses, ``recipes`` the kinds of training, and ``run`` the loop, its processes, its
checkpoints and its result. ``config`` documents every option.
"""
