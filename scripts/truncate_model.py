"""Make a draft model: a truncated copy of a base, its first layers with the same embeddings and tokenizer.

    python scripts/truncate_model.py --base models/smollm2-135m-instruct --layers 6 --output models/draft
    python scripts/truncate_model.py --base BASE --layers 6 --output DIR --data FILE --train-minutes 30

The copy drafts (`--draft-model DIR`) and the base decides every token, so it can be bad but never wrong.
Layers in the middle of a model do not write for its LM head, so a copy that was only cut guesses little;
--train-minutes fits it to the base on --data, conversations or texts: KL divergence from the base's own
distribution, all weights of the copy trained.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa.base.causal_lm import CausalLM
from medusa.base.loading import load_base, load_tokenizer
from medusa.cli.main import exit_status
from medusa.cli.options import parse
from medusa.console import ProgressReporter, log_console
from medusa.drafters.draft_model import early_exit
from medusa.files import check_writable_target, replaced_directory
from medusa.options import check_at_least
from medusa.training.data.reading import Example, expanded, read_examples

BATCH_ROWS, ROW_TOKENS = 4, 256


@dataclass(frozen=True)
class TruncateOptions:
    """The options of this program."""

    base: str
    """The model to cut: a directory or a hub id."""
    layers: int
    """Layers to keep, from the first on."""
    output: Path
    """Directory to create."""
    data: tuple[str, ...] = ()
    """To train on: messages or texts, files or hub ids."""
    train_minutes: float = 0.0
    """How long to train; 0 cuts only."""
    learning_rate: float = 5e-4
    """Peak of AdamW's, after a warm-up, falling to 0."""
    seed: int = 0
    """Of the order of the data."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "layers")
        check_at_least(self, 0, "train_minutes")
        if self.train_minutes and not self.data:
            raise ValueError("train_minutes needs data to train on")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; its exit status."""
    options = parse(TruncateOptions, arguments, description=__doc__)
    return exit_status(lambda: truncate(options), show_traceback=False)


def truncate(options: TruncateOptions) -> None:
    """Cut, train where asked to, and write the copy."""
    base, output = options.base, options.output
    check_writable_target(output)
    expanded(options.data)
    tokenizer = load_tokenizer(base)
    teacher = load_base(base, dtype=torch.float32)
    student = truncated(teacher, options.layers)
    made: dict[str, Any] = {
        "base": base,
        "layers": options.layers,
        "base_layers": teacher.config.num_hidden_layers,
    }
    if options.train_minutes:
        rows = token_rows(tokenizer, list(read_examples(options.data)), options.seed)
        log_console().print(f"{len(rows)} rows of {ROW_TOKENS} tokens")
        made |= {name: getattr(options, name) for name in ("data", "train_minutes", "learning_rate", "seed")}
        made |= train(student, teacher, rows, 60 * options.train_minutes, options.learning_rate)
    with replaced_directory(output) as partial:
        student.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / "truncated.json").write_text(json.dumps(made, indent=2) + "\n")
    print(f"wrote {output}: layers 1 to {options.layers} of {made['base_layers']} of {base}")


def truncated(base: CausalLM, num_layers: int) -> CausalLM:
    """A copy of the first ``num_layers`` layers of ``base``, its embeddings, final norm and LM head."""
    shallow = early_exit(base, num_layers)
    copy = type(base)(shallow.config)
    copy.load_state_dict(shallow.state_dict())
    copy.generation_config = base.generation_config
    return copy.eval()


def token_rows(tokenizer: Any, examples: list[Example], seed: int) -> Tensor:
    """All examples as one stream, in random order, cut into rows (R, ROW_TOKENS) long.

    Raises:
        ValueError: the examples do not fill one batch.
    """
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed)).tolist()
    stream: list[int] = []
    for index in order:
        example = examples[index]
        text = example.text
        if text is None:
            text = tokenizer.apply_chat_template(list(example.messages), tokenize=False)
        stream += tokenizer(text, add_special_tokens=example.text is not None)["input_ids"]
    num_rows = len(stream) // ROW_TOKENS
    if num_rows < BATCH_ROWS:
        raise ValueError(
            f"data must hold at least {BATCH_ROWS * ROW_TOKENS} tokens, got {len(stream)}; give more files"
        )
    return torch.tensor(stream[: num_rows * ROW_TOKENS]).view(num_rows, ROW_TOKENS)


def train(
    student: CausalLM, teacher: CausalLM, rows: Tensor, seconds: float, learning_rate: float
) -> dict[str, Any]:
    """Fit ``student`` to ``teacher`` on ``rows`` (R, T) long until ``seconds`` are over; what came of it."""
    optimizer = torch.optim.AdamW(student.parameters(), lr=learning_rate, weight_decay=0.0)
    began = time.monotonic()
    losses: list[float] = []
    student.train()
    with ProgressReporter("training") as progress:
        for number, batch in enumerate(batches(rows), start=1):
            passed = (time.monotonic() - began) / seconds
            if passed >= 1:
                break
            rate = learning_rate * min(1.0, number / 50) * 0.5 * (1 + math.cos(math.pi * passed))
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = divergence(student, teacher, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            progress.show(passed, f"step {number}, KL {mean(losses[-20:]):.3f}")
    student.eval()
    return {"steps": len(losses), "first_kl": losses[0], "last_kl": mean(losses[-20:])}


def divergence(student: CausalLM, teacher: CausalLM, batch: Tensor) -> Tensor:
    """Mean over positions of KL(teacher || student) in nats, for tokens (B, T) long."""
    with torch.no_grad():
        target = teacher(batch).logits.log_softmax(-1).flatten(0, 1)  # (B * T, V)
    guess = student(batch).logits.log_softmax(-1).flatten(0, 1)  # (B * T, V)
    return F.kl_div(guess, target, log_target=True, reduction="batchmean")


def batches(rows: Tensor) -> Iterator[Tensor]:
    """Batches (BATCH_ROWS, T) of ``rows``, over and over."""
    whole = len(rows) // BATCH_ROWS
    return itertools.cycle(rows[: whole * BATCH_ROWS].view(whole, BATCH_ROWS, -1))


if __name__ == "__main__":
    sys.exit(main())
