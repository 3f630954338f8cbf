"""Repositories of heads on the hub: their content, and pushing.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    ModelCardData,
    get_token,
)
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from medusa.console import percent
from medusa.files import Layout, read_json, write_json
from medusa.heads.checkpoint import (
    ADAPTER_CONFIG_FILE,
    CONFIG_FILE,
    HEADS_FILES,
    HEADS_LAYOUT,
    HeadsCheckpoint,
)
from medusa.hub import LOG_IN, split_revision
from medusa.interop import custom_generate
from medusa.interop.conversion import EXPORT_LAYOUT, FORMATS, export_heads
from medusa.interop.protocol import ToExport, quantised_base

_CARD_FILE = "README.md"
_CUSTOM_FILES = (f"{custom_generate.FOLDER}/generate.py", f"{custom_generate.FOLDER}/requirements.txt")
REPOSITORY_LAYOUT = Layout(
    "files of an earlier push or dry run",
    (*HEADS_FILES, *_CUSTOM_FILES, *(f"exports/*/{name}" for name in EXPORT_LAYOUT.files), _CARD_FILE),
    HEADS_LAYOUT.is_signed,
)


@dataclass(frozen=True)
class _Pushed:
    """The result of a push."""

    url: str
    commit: str
    deleted: list[str] = field(default_factory=list)
    """Files of an earlier push that this one has no longer."""


def write_repository(folder: Path, heads: Path, facts: CardFacts, request: ToExport) -> list[str]:
    """Write the files of a repository into the empty ``folder``; returns sentences on differences of the
    exports.

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
    (folder / _CARD_FILE).write_text(str(model_card(facts)), encoding="utf-8")
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


def push_folder(folder: Path, name: str, base: str, *, private: bool, overwrite: bool) -> _Pushed:
    """Push the files of ``folder`` to the repository ``name`` in one commit; it is created where it is not.

    Files of an earlier push that ``folder`` does not have are deleted; other files are kept.

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
    api = HfApi()
    files = files_in(folder)
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
            api.create_repo(name, private=private or None)  # None is the account's default
        commit = api.create_commit(
            name,
            operations,
            commit_message="Push heads with medusa",
            parent_commit=None if present is None else present[0],
        )
    return _Pushed(f"{api.endpoint}/{name}", commit.oid, deleted)


def _name_base(path: Path, key: str, base: str) -> None:
    write_json(path, {**read_json(path), key: base})


def _is_own(path: str) -> bool:
    return path != _CARD_FILE and REPOSITORY_LAYOUT.knows(PurePosixPath(path))


def _check_base(api: HfApi, base: str) -> None:
    repository, revision = _place(base)
    try:
        api.model_info(repository, revision=revision)
    except RepositoryNotFoundError as error:
        if type(error) is RepositoryNotFoundError:  # a gated one is there
            raise ValueError(
                f"the hub has no model {base!r}, which these heads would name as their base; give the hub id "
                "of the same weights: --base"
            ) from error


def _place(base: str) -> tuple[str, str | None]:
    """(repository, revision) of a base, which may be one file of it: ``owner/name:Q4_K_M``."""
    return split_revision(base.partition(":")[0])


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
    """Turn errors of the hub and the network in the block into a sentence with advice."""
    try:
        yield
    except (HTTPError, OSError, RuntimeError) as error:  # RuntimeError: the upload of a large file failed
        cause = error.__cause__ or error if isinstance(error, RuntimeError) else error
        status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
        detail = str(cause).strip().partition("\n")[0] or type(cause).__name__
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
            f"the push to {name!r} at {api.endpoint} did not end ({detail}). A push is one commit: it is "
            f"there whole or not at all.{left} The same command tries again, with --overwrite if it is there"
        ) from error


LIBRARY = "medusa-heads"
_EVALUATE = "evaluate them with `medusa evaluate`, whose --json writes such a report"


@dataclass(frozen=True)
class CardFacts:
    """The fields of a card that the heads directory does not hold."""

    repository: str
    """user/repo."""
    base: str
    """Hub id of the base, perhaps with a revision."""
    checkpoint: HeadsCheckpoint
    exports: tuple[str, ...] = ()
    """Formats under exports/, names of :data:`medusa.interop.conversion.FORMATS`."""
    evaluation: Mapping[str, Any] | None = None
    """The report of an evaluation; None where nothing was measured."""
    license: str | None = None
    """As the hub abbreviates it, such as apache-2.0."""
    datasets: tuple[str, ...] = ()
    """Hub ids of the heads' training data."""


def read_evaluation(path: Path, weights_sha256: str) -> dict[str, Any]:
    """The report of an evaluation of the heads whose weights file has this SHA-256.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is no such report, or one of other heads.
    """
    if not path.is_file():
        raise FileNotFoundError(f"evaluation: no file at {str(path)!r}; {_EVALUATE}")
    report = read_json(path)
    missing = [key for key in ("tokens_per_step", "by_category", "made") if key not in report]
    if missing:
        raise ValueError(f"{path} must hold {' and '.join(missing)}, and does not; {_EVALUATE}")
    measured = report["made"].get("heads_sha256")
    if measured != weights_sha256:
        raise ValueError(
            f"{path} is about other heads than these: {report['made'].get('heads')!r}, whose weights have "
            f"SHA-256 {str(measured)[:12]}..., these have {weights_sha256[:12]}...; {_EVALUATE}"
        )
    return report


def model_card(facts: CardFacts) -> ModelCard:
    """The card of a repository of heads."""
    kind = facts.checkpoint.heads.kind
    is_plain_base = facts.checkpoint.adapter is None
    data = ModelCardData(
        library_name=LIBRARY,
        base_model=_place(facts.base)[0],
        base_model_relation="adapter",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", kind, "draft-model", *(["custom_generate"] if is_plain_base else [])],
        license=facts.license,
        datasets=list(facts.datasets) or None,
    )
    parts = [_what(facts), _use(facts), _measured(facts.evaluation), _made(facts.checkpoint.provenance)]
    if facts.exports:
        parts.insert(2, _exports(facts))
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n")


def _what(facts: CardFacts) -> str:
    heads = facts.checkpoint.heads
    size = sum(each.numel() for each in heads.parameters())
    base = f"[{facts.base}](https://huggingface.co/{_place(facts.base)[0]})"
    lines = [
        f"# {facts.repository.partition('/')[2]}",
        "",
        f"Heads that guess up to {heads.num_heads} tokens ahead for {base}: {size / 1e6:.1f} million "
        "parameters. The base checks all guesses in one forward pass and keeps the guesses that it would "
        "have written itself, so in float32 the text is the base's own, token for token.",
    ]
    trained_on = quantised_base(facts.checkpoint)
    if trained_on is not None:
        lines += ["", f"They were trained on the quantised file `{trained_on}`."]
    if facts.checkpoint.adapter is not None:
        lines += [
            "",
            "They were trained together with a LoRA adapter (`adapter/`): the text is the same as from the "
            "base with the adapter, which is another model.",
        ]
    return "\n".join(lines)


def _use(facts: CardFacts) -> str:
    lines = [
        "## Use",
        "",
        "```sh",
        "pip install .  # in a checkout of medusa-heads, which is not on PyPI",
        f"medusa chat --base {facts.base} --heads {facts.repository}",
        "```",
        "",
        "```python",
        "from medusa import MedusaModel",
        "",
        f'model = MedusaModel.from_pretrained("{facts.base}", "{facts.repository}")',
        'inputs = model.tokenizer("Why is the sky blue?", return_tensors="pt")',
        "out = model.generate(**inputs, max_new_tokens=128)",
        "```",
    ]
    if facts.checkpoint.adapter is None:
        lines += [
            "",
            "With a base that `transformers` has loaded:",
            "",
            "```python",
            f'base.generate(**inputs, custom_generate="{facts.repository}", trust_remote_code=True)',
            "```",
        ]
    return "\n".join(lines)


def _exports(facts: CardFacts) -> str:
    lines = ["## In other engines"]
    for name in facts.exports:
        foreign = FORMATS[name]
        assert foreign.serve is not None, "formats that are written say how they are served"
        directory = f"exports/{name}"
        serve = foreign.serve(directory, split_revision(facts.base)[0], facts.checkpoint.heads.num_heads)
        fetch = f"hf download {facts.repository} --include '{directory}/*' --local-dir ."
        lines += ["", f"{foreign.consumer}:", "", "```sh", fetch, serve, "```"]
    return "\n".join(lines)


def _measured(report: Mapping[str, Any] | None) -> str:
    title = "## What they reach\n\n"
    if report is None:
        return f"{title}Nothing was measured for this card."
    settings = report["made"]
    names = list(report["by_category"]) if len(report["by_category"]) > 1 else []
    entries = [(name, report["by_category"][name]) for name in names] + [("all", report)]
    depths = len(report["acceptance_rate"])
    rows = [
        [
            name,
            str(entry["num_prompts"]),
            f"{entry['num_tokens']:,}",
            f"{entry['tokens_per_step']:.2f}",
            *(percent(rate) for rate in [*entry["acceptance_rate"], *[0.0] * depths][:depths]),
        ]
        for name, entry in entries
    ]
    headers = ["category", "prompts", "tokens", "tokens per step", *(f"depth {d + 1}" for d in range(depths))]
    sampling = f"temperature {settings['temperature']:g}" if settings["temperature"] else "greedy"
    return (
        f"{title}Plain decoding writes 1 token per step. Depth d: steps that accepted the guess d tokens "
        f"ahead.\n\n{_table(headers, rows)}\n\n"
        f"{settings['device']}, {settings['dtype']}, {sampling}, at most {settings['max_new_tokens']} new "
        f"tokens, a tree of {settings['tree_nodes']} nodes, {settings['date']}, medusa-heads "
        f"{settings['medusa_version']}. The command:\n\n```sh\n{settings['command']}\n```"
    )


def _made(provenance: Mapping[str, Any]) -> str:
    title = "## How they were made\n\n"
    if not provenance:
        return f"{title}Not recorded."
    training = provenance.get("training", {})
    data = provenance.get("data", {})
    known = {
        "steps": training.get("steps"),
        "training tokens": training.get("tokens"),
        "minutes": training.get("minutes"),
        "training conversations": data.get("training documents"),
        "imported from": provenance.get("imported_from"),
        "finished": provenance.get("finished"),
    }
    rows = [
        [key, f"{value:,}" if isinstance(value, int | float) else str(value)]
        for key, value in known.items()
        if value is not None
    ]
    parts = [_table(["", ""], rows)] if rows else []
    if "command" in provenance:
        parts.append(f"```sh\n{provenance['command']}\n```")
    parts.append("`provenance.json` has the whole configuration and the versions.")
    return title + "\n\n".join(parts)


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in headers[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in (headers, rule, *rows))
