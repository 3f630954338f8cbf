"""What large vocabularies and long prompts cost, on random models of a layer or two, as wide as known ones.

    python scripts/wide_costs.py sampling     # top-p over 152,000 tokens, plain and with 16 nodes
    python scripts/wide_costs.py prompt       # memory of a prompt of 32,768 tokens at the width of 8B
    python scripts/wide_costs.py vocabulary   # 262,144 tokens: drafting, training, stored states

Nothing is loaded from files. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
)

from medusa import CandidateTree, HeadsCheckpoint, HeadsConfig, MedusaHeads, MedusaModel
from medusa.console import log_console
from medusa.engine.weights.load import held_base
from medusa.engine.weights.sources import widen_rest
from medusa.engine.weights.stored import Arithmetic
from medusa.heads.eagle3 import Eagle3Config, Eagle3Head
from medusa.measurement.report import end_with_json
from medusa.training.data.dataset import Documents
from medusa.training.losses import TeacherRows
from medusa.training.states.format import SHARD_BYTES, StatesDirectory

WIDTHS: dict[str, dict[str, Any]] = {
    "Qwen2.5 0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
    },
    "Llama 3.1 8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 4096,
    },
}
SIXTEEN = CandidateTree.from_paths([(), *((0,) * depth + (rank,) for depth in range(3) for rank in range(5))])
DRAFT_VOCAB = 32_768
PROMPT, PROMPT_EAGLE3 = 32_768, 16_384


def base_of(width: str, **changes: Any) -> LlamaForCausalLM:
    """A random base in bfloat16, two layers deep."""
    sizes = {**WIDTHS[width], "num_hidden_layers": 2, "tie_word_embeddings": False, "eos_token_id": None}
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        return LlamaForCausalLM(LlamaConfig(**sizes | changes)).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)


def heads_of(base: LlamaForCausalLM, draft_vocab: int | None = None) -> MedusaHeads:
    size, tokens = base.config.hidden_size, base.config.vocab_size
    if draft_vocab is None:
        heads = MedusaHeads(HeadsConfig(size, tokens, num_heads=3))
    else:
        options = {"unembedding": "token_map", "token_map_size": draft_vocab}
        heads = MedusaHeads(HeadsConfig(size, tokens, num_heads=3, **options), range(draft_vocab))
    return heads.eval().requires_grad_(False)


def milliseconds(work: Callable[[], Any], repeats: int = 5) -> float:
    """The median time of ``work``, after one that does not count."""
    times = []
    for _ in range(1 + repeats):
        began = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times[1:])


# ------------------------------------------------------------------ sampling


def nucleus(scores: torch.Tensor, top_p: float = 0.9) -> int:
    """How many tokens top-p keeps of scores (V,)."""
    return int((scores.softmax(-1).sort(descending=True).values.cumsum(-1) < top_p).sum()) + 1


def sampling() -> dict[str, Any]:
    """Milliseconds of a step: of flat logits, and of such as trained models have."""
    found: dict[str, Any] = {}
    ids = torch.randint(0, 151_936, (1, 64), generator=torch.Generator().manual_seed(1))
    rules = {
        "greedy": {"do_sample": False},
        "temperature": {"do_sample": True, "temperature": 0.8, "seed": 1},
        "top-p": {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 1},
    }
    for name, factor in (("flat", 1.0), ("peaked", 8.0)):
        base = base_of("Qwen2.5 0.5B").float()
        base.lm_head.weight.mul_(factor)
        kept = nucleus(base(ids).logits[0, -1] / 0.8)
        model = MedusaModel(base, heads_of(base, 64), SIXTEEN, engine="packed")  # drafting costs little
        steps: dict[str, dict[str, float]] = {}
        for drafter, tree in (("plain", CandidateTree.chain(0)), ("16 nodes", SIXTEEN)):
            times: dict[str, list[float]] = {rule: [] for rule in rules}
            for _ in range(2):  # in turns
                for rule, options in rules.items():
                    before = time.perf_counter()
                    for _step in model.stream(ids, **options, tree=tree, max_new_tokens=16):
                        now = time.perf_counter()
                        times[rule].append(1000 * (now - before))
                        before = now
            steps[drafter] = {rule: statistics.median(each) for rule, each in times.items()}
        found[name] = {"nucleus": kept, "milliseconds_per_step": steps}
    return found


# ------------------------------------------------------------------ a long prompt


def packed(base: Any) -> Any:
    """``base``, which computes with the kernels and has let its own weights go."""
    widen_rest(base)
    return held_base(base, Arithmetic(int8=False, in_whole_numbers=False), lambda release: {})


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def prompt() -> dict[str, Any]:
    """Bytes at most, beyond the weights, keys and values, and the features that a drafter reads. One layer
    tells: what passes through the layers is let go after each."""
    found = {}
    for name, length in (("plain", PROMPT), ("eagle3", PROMPT_EAGLE3)):
        base = base_of("Llama 3.1 8B", num_hidden_layers=1, max_position_embeddings=length + 256)
        base = packed(base)
        model, drafter = MedusaModel(base, engine="packed"), None
        if name == "eagle3":
            head = Eagle3Head(Eagle3Config.of_base(base, fused_layers=(1,))).eval().requires_grad_(False)
            checkpoint = HeadsCheckpoint(head, "random", CandidateTree.chain(3))
            drafter = model.make_drafter("eagle3", eagle3=checkpoint)
        ids = torch.randint(0, 4096, (1, length), generator=torch.Generator().manual_seed(1))
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 2, "drafter": drafter or "plain"}
        model.generate(ids[:, :64], **options)
        before, began = _status("VmRSS"), time.perf_counter()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        model.generate(ids, **options)
        held = length * 4 * (2 * 8 * 128 + (0 if drafter is None else 4096))
        found[name] = {
            "num_tokens": length,
            "held_bytes": held,
            "beyond_bytes": _status("VmHWM") - before - held,
            "seconds": time.perf_counter() - began,
        }
    return found


# ------------------------------------------------------------------ a large vocabulary


def vocabulary() -> dict[str, Any]:
    """Milliseconds of what grows with 262,144 tokens and a hidden size of 4,096."""
    base = base_of("Llama 3.1 8B", vocab_size=262_144)
    states = torch.randn(64, 4096)
    logits = base.lm_head(states[:8].bfloat16()).float()
    teacher = milliseconds(lambda: base.lm_head.float()(states), 2)
    of_logits = logits.repeat(8, 1)
    rows = milliseconds(lambda: TeacherRows.of_logits(of_logits), 3)
    base.lm_head.bfloat16()
    base = packed(base)
    ids = torch.randint(0, 262_144, (1, 64), generator=torch.Generator().manual_seed(1))
    drafting = {}
    for name, size in (("all", None), ("draft vocabulary", DRAFT_VOCAB)):
        began = time.perf_counter()
        model = MedusaModel(base, heads_of(base, size), SIXTEEN, engine="packed")
        made = time.perf_counter() - began
        for rule, options in (("greedy", {"do_sample": False}), ("sampled", {"do_sample": True, "seed": 1})):
            output: Any = model.generate(
                ids, **options, tree=SIXTEEN, max_new_tokens=16, return_dict_in_generate=True
            )
            phases, count = output.statistics.phase_seconds, output.statistics.num_steps
            drafting[f"{name}, {rule}"] = {phase: 1000 * each / count for phase, each in phases.items()}
        drafting[f"{name}, made once"] = 1000 * made
    return {
        "teacher_product_of_64": teacher,
        "teacher_rows_of_64": rows,
        "steps": drafting,
        "documents": documents(),
        "stored_states": {layers: stored_states(layers) for layers in (0, 3)},
    }


def documents() -> dict[str, float]:
    """Of five million tokens of training text."""
    count = 5_000_000
    tokens = np.random.default_rng(0).integers(0, 262_144, count).astype(np.int32)
    given = Documents(tokens, np.ones(count, bool), np.arange(0, count + 1, 500))
    return {
        "digest": milliseconds(given.digest, 2),
        "draft_vocabulary": milliseconds(lambda: given.most_frequent_labels(DRAFT_VOCAB, 262_144), 2),
    }


def stored_states(num_layers: int) -> dict[str, float]:
    """Megabytes a second of a shard of bfloat16 states of 4,096, with those of some layers."""
    width, length = (1 + num_layers) * 4096, 2048
    count = SHARD_BYTES // (2 * width) // length
    header = {"dtype": "bfloat16", "width": width, "shards": [count], "layers": list(range(num_layers))}
    given = [torch.randn(length, width) for _ in range(count)]
    megabytes = count * length * width * 2 / 1e6
    with tempfile.TemporaryDirectory() as directory:
        starts, needed = np.arange(count + 1) * length, np.ones(count * length, bool)
        states = StatesDirectory(Path(directory), header, starts, needed)
        writing = milliseconds(lambda: states.write(0, enumerate(given), "this program"), 3)
        reading = milliseconds(lambda: [states.row(index) for index in range(count)], 3)
    return {"written": 1000 * megabytes / writing, "read": 1000 * megabytes / reading}


COSTS = {"sampling": sampling, "prompt": prompt, "vocabulary": vocabulary}


@torch.no_grad()
def main() -> None:
    """Measure one of them, and print what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cost", choices=COSTS)
    found = COSTS[parser.parse_args().cost]()
    log_console().print(found)
    end_with_json(found | {"num_threads": torch.get_num_threads()}, None)


if __name__ == "__main__":
    main()
