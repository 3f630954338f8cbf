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
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa.base.causal_lm import CausalLM
from medusa.drafters.self_draft import early_exit
from medusa.files import check_writable_target, replaced_directory
from medusa.training.data.reading import Example, check_sources, read_examples

BATCH_ROWS, ROW_TOKENS = 4, 256
SECONDS_BETWEEN_LINES = 20.0


def main(
    base: Annotated[str, typer.Option(help="the model to cut: a directory or a hub id")],
    layers: Annotated[int, typer.Option(help="layers to keep, from the first on")],
    output: Annotated[Path, typer.Option(help="directory to create")],
    data: Annotated[
        list[str] | None, typer.Option(help="to train on: messages or texts, a file or hub id")
    ] = None,
    train_minutes: Annotated[float, typer.Option(help="how long to train; 0 cuts only")] = 0.0,
    learning_rate: Annotated[
        float, typer.Option(help="peak of AdamW's, after a warm-up, falling to 0")
    ] = 5e-4,
    seed: Annotated[int, typer.Option(help="of the order of the data")] = 0,
) -> None:
    check_writable_target(output)
    if train_minutes and not data:
        raise typer.BadParameter("--train-minutes needs --data to train on")
    check_sources(data or [])
    tokenizer = AutoTokenizer.from_pretrained(base)
    teacher = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    student = truncated(teacher, layers)
    made: dict[str, Any] = {"base": base, "layers": layers, "base_layers": teacher.config.num_hidden_layers}
    if train_minutes:
        rows = token_rows(tokenizer, list(read_examples(data or [])), seed)
        print(f"{len(rows)} rows of {ROW_TOKENS} tokens", flush=True)
        made |= {"data": data, "train_minutes": train_minutes, "learning_rate": learning_rate, "seed": seed}
        made |= train(student, teacher, rows, 60 * train_minutes, learning_rate)
    with replaced_directory(output) as partial:
        student.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / "truncated.json").write_text(json.dumps(made, indent=2) + "\n")
    print(f"wrote {output}: layers 1 to {layers} of {made['base_layers']} of {base}")


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
    began, last_line = time.monotonic(), 0.0
    losses: list[float] = []
    student.train()
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
        if time.monotonic() - last_line > SECONDS_BETWEEN_LINES:
            last_line = time.monotonic()
            left = seconds - (last_line - began)
            print(
                f"step {number}: KL {sum(losses[-20:]) / len(losses[-20:]):.3f}, {left:.0f} s left",
                flush=True,
            )
    student.eval()
    return {"steps": len(losses), "first_kl": losses[0], "last_kl": sum(losses[-20:]) / len(losses[-20:])}


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
    typer.run(main)
