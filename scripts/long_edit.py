"""How fast a long file is given back with a few changes, as editors ask for.

    python scripts/long_edit.py --base qwen2.5-coder-1.5b

The file is a module of Python's standard library. Five of its functions are to get one more parameter, and
the whole file is asked for. It is answered greedily three times: plainly, by default, and with the file
before the edit as ``prediction``. The text is the same each time, right or wrong. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
from pathlib import Path
from typing import Any

from medusa import CandidateTree, MedusaModel
from medusa.assets import DEFAULT_HEADS
from medusa.console import log_console
from medusa.hardware import use_threads
from medusa.measurement.report import end_with_json

NUM_CHANGES = 5
PARAMETER = "trace=None"


def source_of(module: str) -> str:
    """The source of a module of the standard library; nothing of it is run."""
    specification = importlib.util.find_spec(module)
    if specification is None or specification.origin is None:
        raise SystemExit(f"--module must be a module of Python's standard library, got {module!r}")
    return Path(specification.origin).read_text()


def changed_functions(source: str) -> list[str]:
    """Functions of ``source``, all over it, whose parameters stand on one line and whose name occurs once."""
    names = re.findall(r"^ *def (\w+)\(.*\):$", source, re.MULTILINE)
    once = [name for name in names if names.count(name) == 1]
    if len(once) < NUM_CHANGES:
        raise SystemExit(f"--module must have {NUM_CHANGES} functions of different names, got {len(once)}")
    return [once[index * len(once) // NUM_CHANGES] for index in range(NUM_CHANGES)]


def edited(source: str, functions: list[str]) -> str:
    """``source`` as it is asked for."""
    for name in functions:
        source = re.sub(rf"^( *def {name}\(.*)\):$", rf"\1, {PARAMETER}):", source, flags=re.MULTILINE)
    return source


def request(source: str, functions: list[str]) -> str:
    listed = ", ".join(f"`{name}`" for name in functions)
    return (
        f"```python\n{source}```\n\nAdd `{PARAMETER}` as the last parameter of these functions: {listed}. "
        "Change nothing else. Answer with the whole file in one code block."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default="qwen2.5-coder-1.5b", help="as every command names it")
    parser.add_argument("--module", default="copy", help="the file: a module of the standard library")
    parser.add_argument("--max-new-tokens", type=int, help="by default the file's and 64 more")
    options = parser.parse_args()
    use_threads()
    log = log_console()
    model = MedusaModel.from_pretrained(options.base, DEFAULT_HEADS, step="compiled")
    model.compile()
    source = source_of(options.module)
    functions = changed_functions(source)
    messages = [{"role": "user", "content": request(source, functions)}]
    prompt = model.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    num_tokens = options.max_new_tokens or len(model.tokenizer(source)["input_ids"]) + 64
    contenders: dict[str, dict[str, Any]] = {
        "plain": {"tree": CandidateTree.chain(0)},
        "default": {},
        "prediction": {"prediction": f"```python\n{source}```"},
    }
    call = {"do_sample": False, "return_dict_in_generate": True}
    for choice in contenders.values():  # warm
        model.generate(**prompt, **call, **choice, max_new_tokens=8)
    results: dict[str, dict[str, float]] = {}
    answers = {}
    for name, choice in contenders.items():
        output = model.generate(**prompt, **call, **choice, max_new_tokens=num_tokens)
        statistics = output.statistics
        answers[name] = output.sequences[0, prompt["input_ids"].shape[1] :]
        results[name] = {
            "tokens": len(answers[name]),
            "seconds": statistics.prefill_seconds + statistics.decode_seconds,
            "ms_per_token": 1e3 * statistics.decode_seconds / (len(answers[name]) - 1),
            "tokens_per_step": statistics.tokens_per_step,
        }
        share = results[name]["ms_per_token"] / results["plain"]["ms_per_token"]
        log.print(
            f"{name}: {results[name]['ms_per_token']:.1f} ms a token, {share:.2f}x of plain; "
            f"{statistics.tokens_per_step:.2f} tokens a step, {results[name]['seconds']:.0f} s in all"
        )
    text = model.tokenizer.decode(answers["plain"], skip_special_tokens=True)
    end_with_json(
        {
            "base": options.base,
            "module": options.module,
            "lines": source.count("\n"),
            "prompt_tokens": prompt["input_ids"].shape[1],
            "identical": len({tuple(answer.tolist()) for answer in answers.values()}) == 1,
            "as_asked": edited(source, functions).strip() in text,
            "contenders": results,
        },
        None,
    )


if __name__ == "__main__":
    main()
