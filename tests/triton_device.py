"""What the tests of kernels in Triton run on: a card, or Triton's interpreter, which knows no bfloat16.

``conftest.py`` chooses, before anything imports Triton. Whoever imports this is skipped where Triton is not
installed.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: pip install triton, as torch for CUDA does")
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
NEAR = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest difference of a kernel to torch's operators, for numbers of about one."""
