"""The words that arguments of the library and flags of programs choose from.

They stand alone here so that a program can show its help without importing torch.
"""

from typing import Literal

Engine = Literal["auto", "eager", "packed", "int8"]
"""How the base model's layers are executed; the table is in :mod:`medusa.engine`."""
StepKind = Literal["general", "static", "compiled", "captured"]
"""How decode steps are run; the table is in :mod:`medusa.decoding.steps`."""
ForeignName = Literal["vllm-medusa", "vllm-eagle3", "speculators", "mtp"]
"""Formats that heads are written in for other projects, and checked as; see :mod:`medusa.interop`."""
Dtype = Literal["float32", "bfloat16", "float16"]
"""Precision of a base model."""
