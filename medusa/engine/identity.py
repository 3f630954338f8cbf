"""What keys and values depend on, bit by bit, besides the tokens."""

from __future__ import annotations

import torch
import transformers

from medusa.base.causal_lm import CausalLM, lm_head_device
from medusa.engine.building import source_text
from medusa.engine.libraries import digest_of
from medusa.engine.programs import VERSION
from medusa.engine.views import packed_as
from medusa.hardware import device_name


def identity_of(files: str, base: CausalLM, *settings: object) -> str:
    """A digest that two models have in common only where each reads what the other has computed: of the
    digest of their ``files`` (:func:`medusa.base.known_models.digest_of_files`), how ``base`` is run here,
    and further ``settings``."""
    return digest_of(
        files,
        packed_as(base),
        base.dtype,
        device_name(lm_head_device(base)),
        torch.get_num_threads(),
        torch.__version__,
        transformers.__version__,
        source_text(),
        VERSION,
        settings,
    )
