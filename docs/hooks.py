"""Pages of the documentation site that are made from other files, so that nothing is written twice.

The documents of the repository's root become pages. The API reference gets one page for each room of the
library, and the command line reference is what every command answers to ``--help``. Links between documents
are written as they work in the repository; here they are turned to pages of the site.
"""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from medusa.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = {
    "README.md": "index.md",
    "MEASUREMENTS.md": "measurements.md",
    "medusa/pretrained/smollm2-135m-instruct/README.md": "shipped_heads.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Document of the repository -> page of the site."""
ROOMS = (
    "model",
    "decoding",
    "drafters",
    "acceptance",
    "engine",
    "heads",
    "base",
    "learning",
    "trees",
    "training",
    "measurement",
    "serving",
    "interop",
)
REST = "rest"
"""The page of the modules that stand in no room."""
HELP_SECONDS = 300

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
ROLE = re.compile(r":(?:func|class|meth|mod|data|attr|exc):<code>~?([\w.]+)(?:\(\))?</code>")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are no files in ``docs/``."""
    pages = {page: (ROOT / document).read_text(encoding="utf-8") for document, page in DOCUMENTS.items()}
    pages |= {f"reference/{name}.md": reference(name) for name in (*ROOMS, REST)}
    pages["reference/commands.md"] = commands()
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository to pages of the site."""
    here = page.file.src_uri
    source = {target: document for document, target in DOCUMENTS.items()}.get(here, f"docs/{here}")

    def turned(match: re.Match[str]) -> str:
        mark, text, target, anchor = match.groups(default="")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if "://" in target or not (ROOT / path).exists():
            return match.group()
        uri = DOCUMENTS.get(path, path.removeprefix("docs/"))
        if uri == path:  # a file that is no page
            return text
        return f"{mark}[{text}]({posixpath.relpath(uri, posixpath.dirname(here) or '.')}{anchor})"

    return LINK.sub(turned, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the roles of docstrings (:class:`a.B`) to links, where the reference has the name."""

    def linked(match: re.Match[str]) -> str:
        name = match[1]
        return f'<autoref optional identifier="{name}"><code>{name.rpartition(".")[2]}</code></autoref>'

    return ROLE.sub(linked, html)


def reference(room: str) -> str:
    """The page of a room: what its modules say of themselves."""
    folder = ROOT / "medusa" / room
    if room == REST:
        files, title = sorted((ROOT / "medusa").glob("*.py")), "Files and the rest"
        files = [path for path in files if path.stem not in ("__init__", "__main__", *ROOMS)]
    elif folder.is_dir():
        files, title = (
            sorted(folder.rglob("*.py"), key=lambda path: path.with_suffix("").parts),
            room.capitalize(),
        )
    else:
        files, title = [folder.with_suffix(".py")], room.capitalize()
    return f"# {title}\n\n" + "\n\n".join(f"::: {module_name(path)}" for path in files) + "\n"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def commands() -> str:
    """The page of help texts; the programs in train/ and inference/ are other doors to commands."""
    programs = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "scripts").glob("*.py"))]
    names = [*(f"medusa {name}" for name in COMMANDS), *programs]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        texts = list(pool.map(help_text, names))
    intro = (
        "# Command line\n\nPrograms in `train/` and `inference/` are other doors to these commands. Those in "
        "`scripts/` run from a checkout: `python PROGRAM`.\n"
    )
    return intro + "".join(
        f"\n## {name}\n\n```text\n{text.rstrip()}\n```\n" for name, text in zip(names, texts, strict=True)
    )


def help_text(name: str) -> str:
    """What a command or program answers to ``--help``, 80 columns wide."""
    program, *words = name.split()
    start = [program] if program.endswith(".py") else ["-m", program]
    done = subprocess.run(
        [sys.executable, *start, *words, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HELP_SECONDS,
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)},
    )
    if done.returncode:
        raise PluginError(f"{name} --help failed:\n{done.stderr}")
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).replace(str(ROOT) + "/", "")
