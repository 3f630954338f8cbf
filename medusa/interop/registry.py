"""The formats of other projects, by name.

**Adding a format**: a file in this folder with a :class:`medusa.interop.protocol.ForeignFormat`, a line in
:data:`FORMATS`, and, where heads can be written or checked as it, its name in :mod:`medusa.choices`.
"""

from __future__ import annotations

from pathlib import Path

from medusa.files import Layout, read_json
from medusa.interop.eagle3 import SPECULATORS, VLLM_EAGLE3
from medusa.interop.medusa_reference import MEDUSA, MEDUSA_FULL
from medusa.interop.protocol import ForeignFormat
from medusa.interop.vllm_medusa import VLLM_MEDUSA

FORMATS: dict[str, ForeignFormat] = {
    each.name: each for each in (VLLM_MEDUSA, VLLM_EAGLE3, SPECULATORS, MEDUSA, MEDUSA_FULL)
}
"""Every format that is read; those with ``export`` are written too."""


def is_export(directory: Path) -> bool:
    """Whether ``directory`` holds heads of a known format, and no base with them."""
    try:
        return not format_of(directory).holds_base
    except (ValueError, OSError):
        return False


EXPORT_LAYOUT = Layout("an export", ("config.json", "*.safetensors"), is_export)


def format_of(directory: Path) -> ForeignFormat:
    """The format of a directory that someone else made.

    Raises:
        ValueError: it is none of those there are.
    """
    for each in FORMATS.values():
        if each.recognises is not None and each.recognises(directory):
            return each
    config = directory / "config.json"
    if config.exists() and "format_version" in read_json(config):
        raise ValueError(
            f"{directory} is a heads directory of this project, which needs no import; use it as --heads"
        )
    held = ", ".join(sorted(path.name for path in directory.iterdir())[:8]) or "nothing"
    raise ValueError(
        f"{directory} holds no heads of a known format. Known are medusa_lm_head.pt and "
        "medusa_lm_head.safetensors (FasterDecoding/Medusa), a config.json that "
        "says model_type 'medusa' (vLLM), draft_vocab_size (EAGLE-3) or speculators_model_type, and a model "
        f"with medusa_head.* among its weights; it holds {held}. Give the directory that holds the heads"
    )
