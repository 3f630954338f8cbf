"""Repositories of the Hugging Face hub: where their files are, and what to do when there are none.

A repository is named ``owner/name``, or ``owner/name@revision`` with a branch, a tag or a commit. The token,
the cache and the address are huggingface_hub's own (``hf auth login`` or HF_TOKEN, HF_HOME, HF_ENDPOINT).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from medusa.assets import nearest_name

HUB_ARGUMENTS = ("token", "cache_dir", "local_files_only")
"""Further arguments of :func:`hub_directory`, as in ``from_pretrained`` of ``transformers``."""
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


def split_revision(name: str) -> tuple[str, str | None]:
    """(repository, revision) of ``owner/name@revision``; None where no revision is named."""
    repository, at, revision = name.partition("@")
    return (repository, revision) if at and revision else (name, None)


def looks_like_repository(name: str) -> bool:
    """Whether ``name``, which is no directory here, can be a repository: one slash, and no path."""
    return not Path(name).is_absolute() and not name.startswith((".", "~")) and name.count("/") <= 1


def hub_directory(
    source: str | Path,
    files: Sequence[str],
    kind: str,
    advice: str,
    *,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> Path:
    """The directory ``source``, or the copy of a hub repository of that name.

    Where the hub cannot be reached, a copy in the cache will do.

    Args:
        files: patterns of the repository's files to download.
        kind: the kind of the directory, for messages.
        advice: the next step without either, for messages.
        token, cache_dir, local_files_only: as in ``huggingface_hub.snapshot_download``.

    Raises:
        FileNotFoundError: there is neither.
    """
    path = Path(source)
    name = str(source)
    if path.is_dir():
        return path
    if not looks_like_repository(name) or "/" not in name:
        raise FileNotFoundError(f"no {kind} at {name!r}; {_with_nearest_name(name, advice)}")
    repository, revision = split_revision(name)
    with explained_hub_errors(kind, name, advice):
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=list(files),
                token=token,
                cache_dir=cache_dir,
                local_files_only=local_files_only,
            )
        )


@contextmanager
def explained_hub_errors(kind: str, name: str, advice: str) -> Iterator[None]:
    """Turn whatever the hub and the network raise in the block into a FileNotFoundError that says what to do.

    ``kind`` says what is sought in the repository ``name``; ``advice`` is for names that are none. A name
    without an owner may be a misspelling of one that needs no hub: then the message asks for that.
    """
    try:
        yield
    except HFValidationError as error:
        raise FileNotFoundError(f"no {kind} at {name!r}; {_with_nearest_name(name, advice)}") from error
    except GatedRepoError as error:
        raise FileNotFoundError(
            f"the {kind} {name!r} is gated on the hub; accept its terms there, then {LOG_IN}"
        ) from error
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"no {kind} at {name!r}, neither here nor on the hub; {_with_nearest_name(name, advice)}. If the "
            f"repository is private, {LOG_IN}"
        ) from error
    except RevisionNotFoundError as error:
        repository, revision = split_revision(name)
        raise FileNotFoundError(
            f"no {kind} at {name!r}: {repository} on the hub has no revision {revision or 'main'!r}; name a "
            "branch, a tag or a commit that it has"
        ) from error
    except (HTTPError, OSError) as error:
        raise FileNotFoundError(_without_hub(kind, name, error)) from error


def _did_you_mean(name: str) -> str | None:
    """The question for the name without an owner that may be meant; None where none is near."""
    nearest = None if "/" in name else nearest_name(name.partition("@")[0])
    return None if nearest is None else f"did you mean {nearest!r}?"


def _with_nearest_name(name: str, advice: str) -> str:
    """``advice`` on a name that is none, after the question for the name that may be meant."""
    question = _did_you_mean(name)
    return advice if question is None else f"{question} Else {advice}"


def _without_hub(kind: str, name: str, error: Exception) -> str:
    """Why nothing came, and what to do."""
    is_missing_here = isinstance(error, LocalEntryNotFoundError)
    cause = error.__cause__ or error if is_missing_here else error
    if isinstance(cause, HfHubHTTPError) and cause.response.status_code in (401, 403):
        return (
            f"the hub at {constants.ENDPOINT} refused the token for the {kind} {name!r} "
            f"({cause.response.status_code}); {LOG_IN}"
        )
    repository, revision = split_revision(name)
    fetch = f"hf download {repository}{f' --revision {revision}' if revision else ''}"
    if isinstance(cause, OfflineModeIsEnabled):
        why = "HF_HUB_OFFLINE is set; unset it"
    elif is_missing_here and cause is error:
        why = "local_files_only is set; leave it out"
    else:
        first_line = str(cause).strip().partition("\n")[0] or type(cause).__name__
        why = f"the hub at {constants.ENDPOINT} cannot be reached ({first_line}); check the network"
    question = _did_you_mean(name)
    begin = ": it is" if question is None else f"; {question} It is"
    return (
        f"no {kind} at {name!r}{begin} no directory here, the hub's cache has none, and {why}, or run "
        f"`{fetch}` where there is a network and give the directory that it prints"
    )
