"""Tries everything at the widths that people have: random models of two layers, each as wide as a known one.

    python scripts/full_widths.py                       # all families, some minutes each
    python scripts/full_widths.py --only 'Qwen3 0.6B'   # one of them; what the others gave is kept

A random model runs as a trained one of its width does, and two layers show what a width breaks. Some
channels are ten to thirty times the others, as in trained models. For each family: the engines packed and
int8, general and compiled steps, Medusa heads, dynamic heads with suffix match and a right prediction, an
EAGLE-3 head, greedy and sampled, one row and three ragged ones. What each writes must be what plain decoding
of the same engine writes; packed, what ``generate`` of transformers writes in float32. Then `medusa train`
(live, and from stored states), `export`, `info` and `generate`.

Counts are kept in measurements/full_widths.json, and the page docs/guides/sizes.md is written from them after
each family. The exit status is 1 where anything failed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, get_args

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from medusa import CandidateTree, HeadsCheckpoint, HeadsConfig, MedusaHeads, MedusaModel
from medusa.base.causal_lm import hidden_size, vocab_size
from medusa.cli.main import main as medusa
from medusa.engine.weights.load import load_base
from medusa.hardware import device_name
from medusa.heads.eagle3 import Eagle3Config, Eagle3Head
from medusa.heads.medusa_heads import Unembedding
from medusa.options import Engine, StepKind

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "measurements" / "full_widths.json"
PAGE = ROOT / "docs" / "guides" / "sizes.md"
TREE = CandidateTree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
NEW_TOKENS = 12
LENGTHS = (17, 5, 11)
ENGINES: tuple[Engine, ...] = ("packed", "int8")
STEPS: tuple[StepKind, ...] = ("general", "compiled")
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 7},
}
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
_LLAMA = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0}
_QWEN = {"rms_norm_eps": 1e-6, "rope_theta": 1000000.0}


def _family(
    kind: str, hidden: int, inner: int, heads: int, kv_heads: int, vocabulary: int, tied: bool, **others: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        **others,
    }


FAMILIES: dict[str, dict[str, Any]] = {
    "SmolLM2 360M": _family("llama", 960, 2560, 15, 5, 49152, True, rope_theta=100000.0),
    "Qwen2.5 0.5B": _family("qwen2", 896, 4864, 14, 2, 151936, True, **_QWEN),
    "Qwen3 0.6B": _family("qwen3", 1024, 3072, 16, 8, 151936, True, head_dim=128, **_QWEN),
    "Qwen3 4B": _family("qwen3", 2560, 9728, 32, 8, 151936, True, head_dim=128, **_QWEN),
    "Gemma 3 1B": _family(
        "gemma3_text", 1152, 6912, 4, 1, 262144, True, head_dim=256, query_pre_attn_scalar=256,
        sliding_window=512, layer_types=["sliding_attention", "full_attention"],
    ),
    "Llama 3.2 1B": _family("llama", 2048, 8192, 32, 8, 128256, True, **_LLAMA),
    "Llama 3.1 8B": _family("llama", 4096, 14336, 32, 8, 128256, False, **_LLAMA),
    "TinyLlama 1.1B": _family("llama", 2048, 5632, 32, 4, 32000, False),
    "Pythia 1.4B": _family("gpt_neox", 2048, 8192, 16, 16, 50304, False, rotary_pct=0.25),
    "Phi-3 mini": _family("phi3", 3072, 8192, 32, 32, 32064, False),
    "OLMo 2 1B": _family("olmo2", 2048, 8192, 16, 16, 100352, False, **_LLAMA),
    "Granite 3.3 2B": _family(
        "granite", 2048, 8192, 32, 8, 49159, True, embedding_multiplier=12.0, logits_scaling=8.0,
        residual_multiplier=0.22, attention_multiplier=0.015625,
    ),
    "SmolLM3 3B": _family("smollm3", 2048, 11008, 16, 4, 128256, True, no_rope_layers=[1, 0], **_QWEN),
    "Mistral 7B": _family("mistral", 4096, 14336, 32, 8, 32768, False, sliding_window=None),
    "Qwen3 30B-A3B": _family(
        "qwen3_moe", 2048, 768, 32, 4, 151936, False, head_dim=128, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, norm_topk_prob=True, **_QWEN,
    ),
    "gpt-oss 20B": _family(
        "gpt_oss", 2880, 2880, 64, 8, 201088, False, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
        sliding_window=128, layer_types=["sliding_attention", "full_attention"],
    ),
}  # fmt: skip
"""Widths as the families' own configurations give them."""


# ------------------------------------------------------------------ a model of a family


def write_model(sizes: dict[str, Any], directory: Path) -> None:
    """A random model of two layers in bfloat16, with a byte-level tokenizer, as a base is published."""
    kind = sizes["model_type"]
    known = {"num_hidden_layers": 2, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 0}
    given = {**known, **{name: value for name, value in sizes.items() if name != "model_type"}}
    config = AutoConfig.for_model(kind, **given, eos_token_id=1)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    _make_outliers(model)
    model.generation_config.eos_token_id = None  # answers are as long as they may be
    model.save_pretrained(directory)
    alphabet = ["<|start|>", "<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        chat_template=TEMPLATE,
        additional_special_tokens=["<|start|>"],
    ).save_pretrained(directory)


@torch.no_grad()
def _make_outliers(model: Any) -> None:
    """Have a few channels of the residual stream ten to thirty times as large, and norms to match."""
    generator = torch.Generator().manual_seed(1)
    rows = model.get_input_embeddings().weight
    width = rows.shape[1]
    channels = torch.randperm(width, generator=generator)[: max(2, width // 128)]
    rows[:, channels] *= (10 + 20 * torch.rand(len(channels), generator=generator)).to(rows.dtype)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and parameter.shape == (width,) and "norm" in name and "weight" in name:
            parameter += (0.3 * torch.randn(width, generator=generator)).to(parameter.dtype)
            parameter[channels] *= 0.2
        elif name.endswith(("o_proj.weight", "down_proj.weight", "attention.dense.weight", "4h_to_h.weight")):
            parameter[channels] *= 10


def random_heads(base: Any, **changes: Any) -> MedusaHeads:
    """Heads that read their path and score every sixteenth token at most, unless ``changes`` say else."""
    size, tokens = hidden_size(base), vocab_size(base)
    settings: dict[str, Any] = {"num_heads": 3, "reads_path": True, "unembedding": "token_map", **changes}
    scored = None
    if settings["unembedding"] == "token_map":
        scored = torch.arange(0, tokens, max(1, tokens // 4096))
        settings["token_map_size"] = len(scored)
    torch.manual_seed(2)
    heads = MedusaHeads(HeadsConfig(size, tokens, **settings), token_map=scored)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return heads.eval()


def random_eagle3(base: Any, scored: int | None = 512, own_lm_head: bool = False) -> HeadsCheckpoint:
    """An EAGLE-3 head over both layers."""
    torch.manual_seed(3)
    head = Eagle3Head(Eagle3Config.of_base(base, scored, fused_layers=(1, 2), own_lm_head=own_lm_head))
    return HeadsCheckpoint(head.eval(), base.name_or_path, tree=CandidateTree.chain(3))


# ------------------------------------------------------------------ the attempts


@dataclass
class Tried:
    """The attempts with one family."""

    passed: dict[str, int] = field(default_factory=dict)
    """By column of the page."""
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0
    day: str = field(default_factory=lambda: date.today().isoformat())
    device: str = field(default_factory=lambda: device_name(torch.device("cpu")))

    def note(self, column: str, what: str, fault: str | None) -> None:
        """Count one attempt; ``fault`` is its error."""
        self.passed[column] = self.passed.get(column, 0) + (fault is None)
        if fault is not None:
            self.failed.append(f"{column}, {what}: {fault}")


def prompts_of(vocabulary: int, num_rows: int) -> dict[str, Tensor]:
    """One prompt, or several of different lengths with padding on the left."""
    generator = torch.Generator().manual_seed(5)
    longest = LENGTHS[0]
    ids = torch.randint(3, vocabulary, (num_rows, longest), generator=generator)
    mask = torch.stack([torch.arange(longest) >= longest - LENGTHS[row] for row in range(num_rows)]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def try_decoding(directory: Path, tried: Tried, engines=ENGINES, steps=STEPS) -> None:
    """Every engine, step, drafter, sampling and number of rows on the model in ``directory``."""
    ordinary = load_base(directory, dtype=torch.float32)
    vocabulary, length = vocab_size(ordinary), {"max_new_tokens": NEW_TOKENS}
    theirs = {
        rows: ordinary.generate(**prompts_of(vocabulary, rows), **length, do_sample=False) for rows in (1, 3)
    }
    heads, eagle3 = random_heads(ordinary), random_eagle3(ordinary)
    plainly = MedusaModel(ordinary)
    expected = {
        (rows, how): plainly.generate(
            **prompts_of(vocabulary, rows), **length, **sampling, tree=CandidateTree.chain(0)
        )
        for rows in (1, 3)
        for how, sampling in SAMPLING.items()
    }
    del ordinary, plainly
    gc.collect()
    for engine in engines:
        base = load_base(directory, engine)
        for step in steps:
            model = MedusaModel(base, heads, TREE, engine=engine, step=step)
            column = f"{engine}, {step}"
            for rows in (1, 3):
                batch = prompts_of(vocabulary, rows)
                for how, sampling in SAMPLING.items():
                    what = f"{how}, {rows} rows"
                    call: dict[str, Any] = {**batch, **length, **sampling}
                    plain = model.generate(**call, tree=CandidateTree.chain(0))
                    if engine == "packed":
                        tried.note(column, f"{what}, plain", difference(plain, expected[rows, how]))
                        if how == "greedy":
                            tried.note(column, f"{what}, transformers", difference(plain, theirs[rows]))
                    answers = plain[:, batch["input_ids"].shape[1] :].tolist()
                    for name, guessing in {
                        "heads": {"drafter": "heads"},
                        "dynamic-heads+suffix": {"drafter": "dynamic-heads+suffix"},
                        "default, predicted": {"prediction": answers},
                        "eagle3": {"drafter": eagle3_drafter(model, eagle3)},
                    }.items():
                        told = model.generate(**call, **guessing)
                        tried.note(column, f"{what}, {name}", difference(told, plain))


PATHS: dict[str, dict[str, Any]] = {
    "without a path": {"reads_path": False},
    "with a path": {"reads_path": True},
    "with a path in few dimensions": {"reads_path": True, "path_rank": 256},
}
KINDS_OF_HEADS: tuple[tuple[Unembedding, str], ...] = tuple(itertools.product(get_args(Unembedding), PATHS))
"""Unembeddings of Medusa heads, and how they read their path."""


def try_heads(
    directory: Path,
    tried: Tried,
    engine: Engine = "packed",
    fused: Sequence[int] = (),
    kinds: Sequence[tuple[Unembedding, str]] = KINDS_OF_HEADS,
) -> None:
    """Every kind of heads with every unembedding, in compiled steps on the base that is named."""
    base = load_base(directory, engine)
    batch = prompts_of(vocab_size(base), 1)
    call: dict[str, Any] = {**batch, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    for unembedding, path in kinds:
        heads = random_heads(base, unembedding=unembedding, fused_layers=tuple(fused), **PATHS[path])
        model = MedusaModel(base, heads, TREE, engine=engine, step="compiled")
        plain = model.generate(**call, tree=CandidateTree.chain(0))
        for drafter in ("heads", "dynamic-heads", "dynamic-heads+suffix"):
            what = f"{unembedding}, {path}, {drafter}"
            tried.note("kinds of heads", what, difference(model.generate(**call, drafter=drafter), plain))
        del model, heads
        gc.collect()
    model = MedusaModel(base, engine=engine, step="compiled")
    plain = model.generate(**call, tree=CandidateTree.chain(0))
    for scored, own_lm_head in itertools.product((512, None), (False, True)):
        eagle3 = random_eagle3(base, scored, own_lm_head)
        told = model.generate(**call, drafter=eagle3_drafter(model, eagle3))
        what = f"eagle3, {scored or 'all'} tokens, {'its own' if own_lm_head else 'the base'} rows"
        tried.note("kinds of heads", what, difference(told, plain))


def eagle3_drafter(model: MedusaModel, checkpoint: HeadsCheckpoint) -> Any:
    """A new drafter of the EAGLE-3 head."""
    from medusa.drafters.registry import DrafterFactory, DrafterSettings

    return DrafterFactory(model, DrafterSettings(eagle3=checkpoint)).make("eagle3")


def difference(ours: Tensor, theirs: Tensor) -> str | None:
    """Where two answers differ first; None where they are the same."""
    if ours.shape == theirs.shape and torch.equal(ours, theirs):
        return None
    width = min(ours.shape[1], theirs.shape[1])
    row, column = (ours[:, :width] != theirs[:, :width]).nonzero()[0].tolist()
    return f"row {row} differs from token {column} on"


def try_commands(directory: Path, tried: Tried) -> None:
    """Training from live and from stored states, and commands with its heads."""
    data, base = directory / "data.jsonl", ("--base", str(directory))
    rows = [f"Row {index} of a few words, to learn from." for index in range(24)]
    messages = [
        [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": row}] for row in rows
    ]
    data.write_text("".join(json.dumps({"messages": each}) + "\n" for each in messages))
    training = ["--data", str(data), "--num_heads", "2", "--max_steps", "3", "--tokens_per_batch", "128"]
    training += ["--unembedding", "token_map", "--token_map_size", "64", "--max_length", "64"]
    for kind, more in {
        "live": ["--reads_path", "false"],
        "stored": ["--cache_hidden_states", "true"],
    }.items():
        output = directory / f"run-{kind}"
        words = ["train", *base, *training, "--output_dir", str(output), *more]
        tried.note("commands", f"train, {kind}", _ran(words))
    heads = str(directory / "run-live" / "heads")
    export = [
        "export",
        heads,
        "--to",
        "vllm-medusa",
        "--output",
        str(directory / "export"),
        "--base",
        str(directory),
    ]
    answer = ["generate", *base, "--heads", heads, "--max-new-tokens", "8", "--step", "general", "Hello"]
    without = ["generate", *base, "--max-new-tokens", "8", "--step", "general", "Hello"]
    for words in (export, ["info", heads], ["info", str(directory)], answer, without):
        tried.note("commands", " ".join(words[:1]), _ran(words))


def _ran(words: list[str]) -> str | None:
    """The last output of a failed command."""
    with tempfile.TemporaryFile("w+") as said:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status = medusa(words)
        said.seek(0)
        return None if status == 0 else said.read().strip().splitlines()[-1][-300:]


def try_family(sizes: dict[str, Any]) -> Tried:
    """Everything, on a model that is written for it and deleted."""
    tried, began = Tried(), time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        write_model(sizes, Path(directory))
        gc.collect()
        try_decoding(Path(directory), tried)
        gc.collect()
        try_heads(Path(directory), tried)
        gc.collect()
        try_commands(Path(directory), tried)
    tried.seconds = time.perf_counter() - began
    return tried


# ------------------------------------------------------------------ the page


ABOUT = """\
# Sizes that were tried

Each line is a random model as wide as the family that it is called after, with two layers: hidden and inner \
width, vocabulary, heads and their width are the family's own. A few channels are ten to thirty times as \
large as the others, as in trained models. Every text with guesses must be, token for token, the text of \
plain decoding on the same engine. With `engine="packed"` it must also be what `transformers`' `generate` \
writes in float32."""
LEGEND = """

A number is how many attempts were right, of how many. Decoding: Medusa heads in a tree, dynamic heads with \
suffix match, the default with a right prediction, an EAGLE-3 head; greedy and sampled; one row and three \
ragged ones. Kinds of heads: Medusa heads that read their path, in all dimensions or in 256, and that do \
not, with the base's rows, rows of their own and a token map, and EAGLE-3 heads, all compiled on a base that \
was loaded by its name. A dash: not among the attempts of that day. \
Commands: `medusa train` for three steps, live and from stored states, `export`, `info` of heads and of the \
base, `generate` with heads and without.

Written by `python scripts/full_widths.py`: {where}. A family of your own is a line of `FAMILIES` there.
"""
COLUMNS = (*(f"{engine}, {step}" for engine in ENGINES for step in STEPS), "kinds of heads", "commands")


def page(found: dict[str, Tried]) -> str:
    """The guide: attempts and successes."""
    lines = [
        *ABOUT.splitlines(),
        "",
        "| as wide as | hidden | inner | vocabulary | " + " | ".join(COLUMNS) + " | minutes | day |",
        "|---|---:|---:|---:|" + "---:|" * (len(COLUMNS) + 2),
    ]
    for name, tried in found.items():
        sizes = FAMILIES[name]
        counts = [_count(tried, column) for column in COLUMNS]
        widths = [f"{sizes[key]:,}" for key in ("hidden_size", "intermediate_size", "vocab_size")]
        cells = [name, *widths, *counts, f"{tried.seconds / 60:.1f}", tried.day]
        lines.append(f"| {' | '.join(cells)} |")
    failed = [f"- {name}: {each}" for name, tried in found.items() for each in tried.failed]
    lines += ["", *(["What failed:", "", *failed, ""] if failed else [])]
    machines = sorted({f"{tried.day} on {tried.device}" for tried in found.values()})
    return "\n".join(lines) + LEGEND.format(where="; ".join(machines))


def _count(tried: Tried, column: str) -> str:
    wrong = sum(each.startswith(f"{column},") for each in tried.failed)
    right = tried.passed.get(column, 0)
    return f"{right} of {right + wrong}" if right + wrong else "-"


def _in_a_process_of_its_own(name: str) -> Tried:
    """The attempts with one family, in a process of its own: the next finds all memory free."""
    command = [sys.executable, __file__, "--only", name, "--json"]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = ran.stdout.strip().splitlines()
    if not lines:
        return Tried(failed=[f"commands, all: the process ended with status {ran.returncode}"])
    return Tried(**json.loads(lines[-1]))


def main() -> int:
    """Try the requested families, print the results, and write the page after all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=FAMILIES, help="families to try")
    parser.add_argument("--json", action="store_true", help="print one line of JSON, for one family")
    options = parser.parse_args()
    if options.json:
        print(json.dumps(vars(try_family(FAMILIES[options.only[0]]))))
        return 0
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for name in options.only or FAMILIES:
        tried = _in_a_process_of_its_own(name)
        kept[name] = vars(tried)
        counts = ", ".join(f"{column}: {_count(tried, column)}" for column in COLUMNS)
        print(f"{name}: {counts} ({tried.seconds:.0f} s)", *tried.failed, sep="\n    ", flush=True)
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
        PAGE.write_text(page({name: Tried(**kept[name]) for name in FAMILIES if name in kept}))
    return int(any(kept[name]["failed"] for name in options.only or FAMILIES))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
