"""After how many minutes of learning does a base answer faster?

    python scripts/learning_curve.py --base qwen2.5-coder-0.5b --prompts runs/coder/prompts.jsonl

Runs `medusa learn` once for each of --minutes, each time from new heads, in a cache of its own, so that what
was learned before is neither used nor changed. The picture shows what the heads gave on questions that were
kept apart, beside what the base has without them. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa.assets import cache_home
from medusa.console import log_console
from medusa.measurement.report import end_with_json
from medusa.plots import BLUE, FAINT, INK, ORANGE, beside, figure_of, short_name


def learned(base: str, prompts: Path | None, minutes: float, cache: Path) -> dict[str, Any]:
    """The report of one `medusa learn`, of heads that begin anew."""
    report = cache / "learned.json"
    words = [sys.executable, "-m", "medusa", "learn", base, "--minutes", f"{minutes:g}", "--fresh"]
    words += [] if prompts is None else ["--prompts", str(prompts)]
    environment = {**os.environ, "MEDUSA_CACHE": str(cache)}
    subprocess.run([*words, "--json", str(report)], env=environment, check=True, stdout=sys.stderr)
    return json.loads(report.read_text(encoding="utf-8"))


def plot_curve(rounds: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw the speed after so many minutes, and that of what was in use before."""
    with figure_of(path, title, [1.0]) as (ax,):
        minutes = [entry["minutes"] for entry in rounds]
        ax.plot(minutes, [entry["speedup"] for entry in rounds], "o-", color=ORANGE, label="learned heads")
        before = sum(entry["speedup_before"] for entry in rounds) / len(rounds)
        ax.axhline(before, color=BLUE, linewidth=1.2, label="what was in use before")
        ax.axhline(1.0, color=FAINT, linewidth=1, zorder=0)
        for entry in rounds:
            ax.annotate(
                f"{entry['speedup']:.2f}x",
                (entry["minutes"], entry["speedup"]),
                (6, -12),
                **beside(INK, ha="left"),
            )
        ax.set_xlim(0, max(minutes) * 1.15)
        ax.set_ylim(0.9, None)
        ax.set_xlabel("minutes of `medusa learn`, all in all")
        ax.set_ylabel("times plain decoding")
        ax.legend(loc="lower right")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", required=True, help="a base, as `medusa learn` takes it")
    parser.add_argument("--prompts", type=Path, help="questions to learn from; none are those that ship")
    parser.add_argument("--minutes", type=float, nargs="+", default=[6.0, 12.0, 24.0])
    parser.add_argument("--plot", type=Path, default=Path("runs/plots/learning.png"))
    parser.add_argument("--json", type=Path, help="where the report goes; - is standard output")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="medusa-learning-") as folder:
        cache = Path(folder)
        for name in ("compiled", "models"):  # what is only looked up there
            (cache / name).symlink_to(cache_home() / name)
        rounds = [learned(options.base, options.prompts, minutes, cache) for minutes in options.minutes]
    plot_curve(rounds, options.plot, f"{short_name(options.base)}, learning on this machine")
    log_console().print(f"picture: {options.plot}", soft_wrap=True)
    end_with_json({"base": options.base, "rounds": rounds}, options.json)


if __name__ == "__main__":
    main()
