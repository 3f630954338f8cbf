"""Repositories of heads on the hub: what is in them, and how they get there.

    config.json, model.safetensors, ...     the heads directory, bit for bit; config.json names the base by
                                            its hub id
    custom_generate/                        for ``transformers``: see medusa.interop.custom_generate
    exports/NAME/                           the heads as another engine reads them, where asked for
    README.md                               the card

A push is one commit, so that it is there whole or not at all. ``upload_folder`` is not used: it may make
several.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from medusa.files import Layout, read_json, write_json
from medusa.heads.checkpoint import ADAPTER_CONFIG_FILE, CONFIG_FILE, HEADS_FILES, HEADS_LAYOUT
from medusa.hub import LOG_IN, split_revision
from medusa.interop import custom_generate
from medusa.interop.conversion import export_heads
from medusa.interop.model_card import CardFacts, model_card
from medusa.interop.protocol import ToExport
from medusa.interop.registry import EXPORT_LAYOUT

CARD_FILE = "README.md"
CUSTOM_FILES = (f"{custom_generate.FOLDER}/generate.py", f"{custom_generate.FOLDER}/requirements.txt")
REPOSITORY_LAYOUT = Layout(
    "what an earlier push or dry run wrote",
    (*HEADS_FILES, *CUSTOM_FILES, *(f"exports/*/{name}" for name in EXPORT_LAYOUT.files), CARD_FILE),
    HEADS_LAYOUT.is_signed,
)


@dataclass(frozen=True)
class Pushed:
    """What a push made."""

    url: str
    commit: str
    deleted: list[str] = field(default_factory=list)
    """Files of an earlier push that this one has no longer."""


def write_repository(folder: Path, heads: Path, facts: CardFacts, request: ToExport) -> list[str]:
    """Write the files of a repository into the empty ``folder``; what the exports do otherwise, as sentences.

    Args:
        heads: the heads directory.
        request: the heads as exports take them.

    Raises:
        ValueError: an export has no place for such heads.
    """
    changes: list[str] = []
    for name in HEADS_FILES:
        if (heads / name).exists():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(heads / name, folder / name)
    _name_base(folder / CONFIG_FILE, "base_model", facts.base)
    if facts.checkpoint.adapter is None:
        own = folder / custom_generate.FOLDER
        own.mkdir()
        (own / "generate.py").write_text(custom_generate.GENERATE_FILE, encoding="utf-8")
        (own / "requirements.txt").write_text(custom_generate.REQUIREMENTS_FILE, encoding="utf-8")
    else:
        _name_base(folder / ADAPTER_CONFIG_FILE, "base_model_name_or_path", split_revision(facts.base)[0])
    for name in facts.exports:
        written = export_heads(request, name, folder / "exports" / name)
        changes += [f"exports/{name}: {change}" for change in written.changes]
    (folder / CARD_FILE).write_text(str(model_card(facts)), encoding="utf-8")
    return changes


def files_in(folder: Path) -> list[str]:
    """The files of a folder, by their paths in it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def check_repository_name(name: str) -> None:
    """Raise ValueError unless ``name`` can be a repository of a user or an organisation."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError(f"repository must be of the form user/repo, got {name!r}: {error}") from error
    if "/" not in name:
        raise ValueError(f"repository must be of the form user/repo, got {name!r}; put your user name before")


def push_folder(folder: Path, name: str, base: str, *, private: bool, overwrite: bool) -> Pushed:
    """Push the files of ``folder`` to the repository ``name`` in one commit; it is created where it is not.

    Files of an earlier push that ``folder`` does not have are deleted; other files are left alone.

    Args:
        base: hub id of the base that the card names; it must be there.

    Raises:
        ConnectionError: the hub cannot be reached or fails.
        FileExistsError: the repository holds files, and ``overwrite`` is false.
        PermissionError: there is no token, or it may not write there.
        ValueError: the hub has no such base.
    """
    if get_token() is None:
        raise PermissionError(f"pushing to {name!r} needs a token with the right to write; {LOG_IN}")
    api, files = HfApi(), files_in(folder)
    with _explained_push_errors(api, name):
        user = api.whoami()["name"]
        _check_base(api, base)
        present = _present(api, name)
    held = [] if present is None else [each for each in present[1] if each != ".gitattributes"]
    if held and not overwrite:
        raise FileExistsError(
            f"the repository {name!r} holds {len(held)} files ({', '.join(held[:4])}, ...); push to another, "
            "or give --overwrite: files of the names that are pushed are replaced, README.md among them"
        )
    deleted = [each for each in held if each not in files and _is_own(each)]
    operations: list[Any] = [CommitOperationAdd(each, str(folder / each)) for each in files]
    operations += [CommitOperationDelete(each) for each in deleted]
    with _explained_push_errors(api, name, user, is_empty=present is None):
        if present is None:
            api.create_repo(name, private=private or None)  # None is what the account has chosen
        commit = api.create_commit(
            name,
            operations,
            commit_message="Push heads with medusa",
            parent_commit=None if present is None else present[0],
        )
    return Pushed(f"{api.endpoint}/{name}", commit.oid, deleted)


def _name_base(path: Path, key: str, base: str) -> None:
    write_json(path, {**read_json(path), key: base})


def _is_own(path: str) -> bool:
    return path != CARD_FILE and REPOSITORY_LAYOUT.knows(PurePosixPath(path))


def _check_base(api: HfApi, base: str) -> None:
    repository, revision = split_revision(base)
    try:
        api.model_info(repository, revision=revision)
    except RepositoryNotFoundError as error:
        if type(error) is RepositoryNotFoundError:  # a gated one is there
            raise ValueError(
                f"the hub has no model {base!r}, which these heads would name as their base; give the hub id "
                "of the same weights: --base"
            ) from error


def _present(api: HfApi, name: str) -> tuple[str | None, list[str]] | None:
    """(commit, files) of a repository; None where there is none."""
    try:
        info = api.model_info(name)
    except RepositoryNotFoundError:
        return None
    return info.sha, [each.rfilename for each in info.siblings or []]


@contextmanager
def _explained_push_errors(
    api: HfApi, name: str, user: str | None = None, is_empty: bool = False
) -> Iterator[None]:
    """Turn what the hub and the network raise in the block into a sentence that says what to do."""
    try:
        yield
    except (HTTPError, OSError, RuntimeError) as error:  # RuntimeError: the upload of a large file failed
        cause = error.__cause__ or error if isinstance(error, RuntimeError) else error
        status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
        said = str(cause).strip().partition("\n")[0] or type(cause).__name__
        if status == 401:
            raise PermissionError(
                f"the hub at {api.endpoint} does not know the token that pushes to {name!r} (401); {LOG_IN}"
            ) from error
        if status == 403:
            raise PermissionError(
                f"the token may not write to {name!r} (403): it belongs to {user!r}; push to {user}/NAME, or "
                "use a token with the right to write there"
            ) from error
        left = " The repository was created and may still be empty." if is_empty else ""
        raise ConnectionError(
            f"the push to {name!r} at {api.endpoint} did not end ({said}). A push is one commit: it is there "
            f"whole or not at all.{left} The same command tries again, with --overwrite if it is there"
        ) from error
