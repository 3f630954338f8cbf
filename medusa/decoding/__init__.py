"""From a request to tokens: the loop, and how its steps are run (``step=``).

A step drafts a tree, verifies it in one forward pass, accepts a path and commits it to the cache. ``loop``
does this step by step; the static modules do it with tensors of fixed shape, which can be compiled or
captured as a CUDA graph. Both give the same tokens.
"""
