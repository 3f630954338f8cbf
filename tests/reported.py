"""Commands, run in this process."""

import json
from pathlib import Path

from medusa.cli.main import main


def ran(capsys, words, status: int = 0):
    """Standard output and standard error, ``out`` and ``err``, of a command that ends with this status."""
    ended = main([*words])
    printed = capsys.readouterr()
    assert ended == status, printed.err
    return printed


def reported(capsys, *words) -> tuple[dict, str, str]:
    """The report of a command that ended well, and all of standard output and of standard error."""
    words = tuple(map(str, words))
    printed = ran(capsys, words)
    if "--json" in words and (written := words[words.index("--json") + 1]) != "-":
        return json.loads(Path(written).read_text()), printed.out, printed.err
    return json.loads(printed.out.splitlines()[-1]), printed.out, printed.err


def last_report(capsys) -> dict:
    """The report that a command has just printed."""
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def assert_fidelity_is_told(base, folder, capsys) -> None:
    """``evaluate --fidelity`` finds whole numbers further from the widened ``base`` than rows of float32."""
    answered = folder / "answered.jsonl"
    answered.write_text(json.dumps({"prompt": "why?", "answer": "the thin man thinks"}) + "\n")
    flags = ["--fidelity", "--base", base, "--prompts", answered]
    whole, *_ = reported(capsys, "evaluate", *flags)
    packed, *_ = reported(capsys, "evaluate", "--engine", "packed", *flags)
    assert 10 * abs(packed["engines"]["packed"]["kl"]) < whole["engines"]["int8"]["kl"]
