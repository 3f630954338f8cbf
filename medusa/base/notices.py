"""Notices of ``transformers`` that no user can act on, and that are not shown: named one by one."""

from __future__ import annotations

import logging
import re

NOTICES = {
    "integrations.hub_kernels": r"is falling back to its reference PyTorch implementation",
    "configuration_utils": r"is None, initializing \w+ with default values",
    "models.idefics3.configuration_idefics3": r"^`self.pad_token_id` is deprecated",
    "models.smolvlm.configuration_smolvlm": r"^`self.pad_token_id` is deprecated",
}
"""What a notice says, by the module that gives it."""
UNREAD_PARTS = re.compile(
    r"(^|\.)(visual|vision_\w+|image_\w+|audio_\w+|embed_(vision|audio)|multi_modal_projector|mtp)\."
)
"""Names of weights that a base which writes text has no use for."""
COLOUR = re.compile("\x1b\\[[0-9;]*m")
REPORTED_KEY = re.compile(r"^(\S+) *\|.*\b(UNEXPECTED|MISSING|MISMATCH|CONVERSION)\b", re.MULTILINE)


def is_shown(record: logging.LogRecord) -> bool:
    """Whether a notice is something that a user can act on."""
    text = record.getMessage()
    module = record.name.removeprefix("transformers.")
    if module == "modeling_utils":
        return not _is_report_of_unread_parts(text)
    return re.search(NOTICES[module], text) is None


def _is_report_of_unread_parts(text: str) -> bool:
    """Whether this is the report of a load that names nothing but weights of parts that are not read."""
    reported = REPORTED_KEY.findall(COLOUR.sub("", text))
    return bool(reported) and all(
        status == "UNEXPECTED" and UNREAD_PARTS.search(key) for key, status in reported
    )


def hide_notices() -> None:
    """Have these notices not shown by whatever loads and runs a base here; also more than once."""
    for module in (*NOTICES, "modeling_utils"):
        logging.getLogger(f"transformers.{module}").addFilter(is_shown)
