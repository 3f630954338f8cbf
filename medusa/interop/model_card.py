"""The card of heads on the hub: what they are, how to use them, what was measured, how they were made.

Every number on it comes from provenance.json or from the report of an evaluation of these very heads; what
is not known is left out or said to be unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from medusa.files import read_json
from medusa.heads.checkpoint import HeadsCheckpoint, kind_of
from medusa.hub import split_revision
from medusa.interop.registry import FORMATS
from medusa.tables import percent

LIBRARY = "medusa-heads"
EVALUATE = "evaluate them with `medusa evaluate`, whose --json writes such a report"


@dataclass(frozen=True)
class CardFacts:
    """What a card says beside what the heads themselves hold."""

    repository: str
    """user/repo."""
    base: str
    """Hub id of the base, perhaps with a revision."""
    checkpoint: HeadsCheckpoint
    exports: tuple[str, ...] = ()
    """Formats that lie under exports/, names of :data:`medusa.interop.registry.FORMATS`."""
    evaluation: Mapping[str, Any] | None = None
    """The report of an evaluation; None where nothing was measured."""
    license: str | None = None
    """As the hub abbreviates it, such as apache-2.0."""
    datasets: tuple[str, ...] = ()
    """Hub ids of what the heads were trained on."""


def read_evaluation(path: Path, weights_sha256: str) -> dict[str, Any]:
    """The report of an evaluation of the heads whose weights file has this SHA-256.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is no such report, or one of other heads.
    """
    if not path.is_file():
        raise FileNotFoundError(f"evaluation: no file at {str(path)!r}; {EVALUATE}")
    report = read_json(path)
    if missing := [key for key in ("tokens_per_step", "by_category", "made") if key not in report]:
        raise ValueError(f"{path} must hold {' and '.join(missing)}, and does not; {EVALUATE}")
    measured = report["made"].get("heads_sha256")
    if measured != weights_sha256:
        raise ValueError(
            f"{path} is about other heads than these: {report['made'].get('heads')!r}, whose weights have "
            f"SHA-256 {str(measured)[:12]}..., these have {weights_sha256[:12]}...; {EVALUATE}"
        )
    return report


def model_card(facts: CardFacts) -> ModelCard:
    """The card of a repository of heads."""
    kind = kind_of(facts.checkpoint.heads)
    is_plain_base = facts.checkpoint.adapter is None
    data = ModelCardData(
        library_name=LIBRARY,
        base_model=split_revision(facts.base)[0],
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
    base = f"[{facts.base}](https://huggingface.co/{split_revision(facts.base)[0]})"
    lines = [
        f"# {facts.repository.partition('/')[2]}",
        "",
        f"Heads that guess up to {heads.num_heads} tokens ahead for {base}: {size / 1e6:.1f} million "
        "parameters. The base checks all guesses in one forward pass and keeps those that it would have "
        "written itself, so in float32 the text is the base's own, token for token.",
    ]
    if facts.checkpoint.adapter is not None:
        lines += [
            "",
            "They were trained together with a LoRA adapter (`adapter/`): the text is that of the base with "
            "the adapter, which is another model.",
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
    made = report["made"]
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
    sampling = f"temperature {made['temperature']:g}" if made["temperature"] else "greedy"
    return (
        f"{title}Plain decoding writes 1 token per step. Depth d: steps that accepted the guess d tokens "
        f"ahead.\n\n{_table(headers, rows)}\n\n"
        f"{made['device']}, {made['dtype']}, {sampling}, at most {made['max_new_tokens']} new tokens, a tree "
        f"of {made['tree_nodes']} nodes, {made['date']}, medusa-heads {made['medusa_version']}. The "
        f"command:\n\n```sh\n{made['command']}\n```"
    )


def _made(provenance: Mapping[str, Any]) -> str:
    title = "## How they were made\n\n"
    if not provenance:
        return f"{title}Not recorded."
    training, data = provenance.get("training", {}), provenance.get("data", {})
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
