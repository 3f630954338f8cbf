"""What weights in twelve bits change against sixteen: the products of a pass, answers, memory.

    python scripts/twelve_bits.py                        # the embedded base
    python scripts/twelve_bits.py --base runs/shapes/1B  # another one, without heads

Both are loaded in one process and take turns; what is printed are medians. "Products" are all matrix products
of a pass, layer after layer, for as many rows as a step has nodes or a prompt has tokens. Answers are greedy,
by compiled steps, for which this compiles first. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import GenerationConfig

from medusa import MedusaModel
from medusa.assets import EMBEDDED_BASE, embedded_base
from medusa.console import log_console
from medusa.engine.views import share_of_outliers
from medusa.engine.weights.forms import uses_twelve_bits
from medusa.engine.weights.products import PackedMatmul
from medusa.measurement.report import STANDARD_OUTPUT, end_with_json
from medusa.measurement.timing import take_turns

ROWS = (1, 2, 4, 8, 12, 16, 32, 64, 1000)
SECONDS = 6.0
"""For each number of rows."""
NEW_TOKENS = 48


def median_milliseconds(works: Mapping[int, Callable[[], Any]], seconds: float) -> dict[int, float]:
    """Medians of what ``works`` take in turns, for so many seconds."""

    def milliseconds(key: int, *turn: int) -> tuple[int, float]:
        start = time.perf_counter()
        works[key]()
        return key, 1000 * (time.perf_counter() - start)

    times = take_turns([*works], 1000, milliseconds, num_warm_ups=1, seconds=seconds)
    return {key: statistics.median(each for of, each in times if of == key) for key in works}


def compared(ms: Mapping[int, float]) -> str:
    return f"{ms[16]:.2f} in 16 bits, {ms[12]:.2f} in 12: {ms[12] / ms[16]:.2f}x"


def products_of(model: MedusaModel) -> list[PackedMatmul]:
    return [module for module in model.engine_base.modules() if isinstance(module, PackedMatmul)]


def multiply(products: list[PackedMatmul], rows: int) -> Callable[[], None]:
    """A function that runs ``products`` once, each on ``rows`` rows of its width."""
    inputs = {each.num_inputs: torch.randn(rows, each.num_inputs) for each in products}

    def run() -> None:
        for each in products:
            each(inputs[each.num_inputs])

    return run


def answer(model: MedusaModel, prompt: torch.Tensor, way: str) -> Callable[[], Any]:
    """A function that writes NEW_TOKENS tokens after ``prompt``, plain or as by default."""
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    drafter = None if way == "default" else way
    return lambda: model.generate(
        prompt, attention_mask=torch.ones_like(prompt), generation_config=config, drafter=drafter
    )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", help="the base; the embedded one with its heads if not given")
    options = parser.parse_args()
    torch.manual_seed(0)
    models, found, log = {}, {}, log_console()
    for bits in (16, 12):
        uses_twelve_bits(bits == 12)
        base, heads = (options.base, None) if options.base else (embedded_base(), EMBEDDED_BASE)
        models[bits] = MedusaModel.from_pretrained(base, heads, engine="packed", step="compiled")
        models[bits].compile()
        products = products_of(models[bits])
        found[str(bits)] = {
            "bytes": sum(each.panels.nbytes for each in products),
            "formats": sorted({each.number_format for each in products}),
        }
    found |= {
        "share_of_outliers": share_of_outliers(models[12].engine_base),
        "products_ms": {},
        "ms_per_token": {},
    }
    for rows in ROWS:
        works = {bits: multiply(products_of(model), rows) for bits, model in models.items()}
        taken = found["products_ms"][rows] = median_milliseconds(works, SECONDS)
        log.print(f"products of {rows} rows, ms: {compared(taken)}")
    prompt, ways = torch.arange(5, 69)[None], ["plain", "default"]
    for way in ways if options.base is None else ways[:1]:
        works = {bits: answer(model, prompt, way) for bits, model in models.items()}
        taken = median_milliseconds(works, 2 * SECONDS)
        found["ms_per_token"][way] = taken = {bits: each / NEW_TOKENS for bits, each in taken.items()}
        log.print(f"{way}, ms a token: {compared(taken)}")
    end_with_json(found | {"num_threads": torch.get_num_threads()}, STANDARD_OUTPUT)


if __name__ == "__main__":
    main()
