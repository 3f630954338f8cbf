"""Heads that were learned for a base by ``medusa learn``: where they are, and which are in use.

A base has one directory below :func:`learned_home`, called by the beginning of its signature:

    record.json          the base, and each version: what it was learned from, and how good it is
    heads-1/ ...         a heads directory for each version that is kept
    answers-1.jsonl ...  the answers of the last rounds, from which later ones learn too
    round/               the round of learning that is under way, until it has ended

A version is never changed but by ``medusa tune``. Readers need no lock: ``record.json`` is replaced whole,
and the heads of a version are there before it names them, and as long as it does. Who writes holds
:meth:`LearnedHeads.locked`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from medusa.assets import cache_home
from medusa.files import (
    clear_interrupted,
    locked,
    read_json,
    replaced_directory,
    replaced_file,
    write_json,
)

KEPT_VERSIONS = 3
"""Versions of a base's heads that are kept, the newest; and files of answers."""
NAME_LENGTH = 16
"""Characters of a signature that name its directory."""
RECORD = "record.json"


def learned_home() -> Path:
    """The directory of all that was learned; perhaps it does not exist."""
    return cache_home() / "learned"


@dataclass(frozen=True)
class LearnedVersion:
    """A version of a base's heads, in plain JSON values."""

    number: int
    """Counted from 1; those that were not better than what was in use are counted, and not kept."""
    made: str
    """When, as ISO 8601."""
    learned_from: list[str]
    """What was read: files, folders, prompts."""
    is_private: bool
    """Whether anything of that was the user's own."""
    num_tokens: int
    """Tokens on which the heads were trained, each counted once."""
    minutes: float
    """How long it took, all in all."""
    tokens_per_step: float
    """On questions that were kept apart, or on the newest answers."""
    speedup: float | None
    """Tokens a second there, against plain decoding; None where nothing was timed."""
    gain: float | None = None
    """Against what was in use before: in tokens a second, or in tokens per step where nothing was timed.
    None in older records."""


@dataclass(frozen=True)
class LearnedHeads:
    """All that was learned for one base."""

    directory: Path

    @classmethod
    def of_signature(cls, signature: str) -> LearnedHeads:
        """Those for the model of this signature (:func:`medusa.base.known_models.signature_of`)."""
        return cls(learned_home() / signature[:NAME_LENGTH])

    @classmethod
    def all(cls) -> list[LearnedHeads]:
        """Those of every base, in the order of their names."""
        stores = (cls(path.parent) for path in learned_home().glob(f"*/{RECORD}"))
        return sorted(stores, key=lambda store: store.base)

    @property
    def base(self) -> str:
        """The name by which the base was called last."""
        return str(self._record().get("base", ""))

    @property
    def has_template(self) -> bool:
        """Whether the base has a chat template; as nearly all do where an older record does not say."""
        return bool(self._record().get("has_template", True))

    @property
    def versions(self) -> list[LearnedVersion]:
        """Those that are kept, the oldest first.

        Raises:
            ValueError: the record is damaged.
        """
        try:
            return [LearnedVersion(**entry) for entry in self._record().get("versions", [])]
        except TypeError as error:
            raise ValueError(
                f"{self.directory / RECORD} is damaged ({error}); remove {self.directory}, and let the base "
                "learn again"
            ) from error

    @property
    def version(self) -> LearnedVersion | None:
        """The one in use; None where none is."""
        number = self._record().get("in_use")
        return next((each for each in self.versions if each.number == number), None)

    @property
    def in_use(self) -> Path | None:
        """The heads directory of the version in use."""
        version = self.version
        return None if version is None else self.heads_of(version)

    @property
    def round(self) -> Path:
        """The directory of a round of learning."""
        return self.directory / "round"

    @property
    def answers(self) -> list[Path]:
        """The answers of the last rounds, the oldest first."""
        return sorted(self.directory.glob("answers-*.jsonl"), key=lambda path: int(path.stem[8:]))

    @property
    def last_number(self) -> int:
        """How many rounds have ended."""
        return int(self._record().get("last_number", 0))

    @property
    def is_private(self) -> bool:
        """Whether any round learned from something of the user's own, of which its answers tell."""
        return bool(self._record().get("is_private"))

    @property
    def num_bytes(self) -> int:
        """Room on the disk."""
        return sum(path.stat().st_size for path in self.directory.rglob("*") if path.is_file())

    def heads_of(self, version: LearnedVersion) -> Path:
        return self.directory / f"heads-{version.number}"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else learns for this base, or forgets, meanwhile.

        Raises:
            BlockingIOError: somebody does now.
        """
        with locked(self.directory):
            self.directory.chmod(0o700)  # what was learned says what was read
            yield

    def begin(self, base: str, has_template: bool | None = None) -> None:
        """Make a place for what is learned for the base of this name, which has a chat template or none, or
        is known (None)."""
        known = {} if has_template is None else {"has_template": has_template}
        write_json(self.directory / RECORD, {**self._record(), "base": base, **known})

    def end_round(self, version: LearnedVersion, heads: Path | None, answers: Path) -> None:
        """Count the round, take ``heads`` into use where it left better ones, keep its ``answers``, and clear
        up."""
        record = self._record()
        kept = self.versions
        if heads is not None:
            for left in self.directory.glob("heads-*"):
                clear_interrupted(left)
            with replaced_directory(self.heads_of(version), overwrite=True) as partial:
                shutil.copytree(heads, partial, dirs_exist_ok=True)
            kept = [*kept, version][-KEPT_VERSIONS:]
            record["in_use"] = version.number
        if answers.exists() and answers.stat().st_size:
            with replaced_file(self.directory / f"answers-{version.number}.jsonl") as copy:
                shutil.copyfile(answers, copy)
        for old in self.answers[:-KEPT_VERSIONS]:
            old.unlink()
        is_private = self.is_private or version.is_private
        self._write(record | {"last_number": version.number, "is_private": is_private}, kept)
        ended = self.directory / "ended"
        shutil.rmtree(ended, ignore_errors=True)  # of an earlier round, where that was killed here
        os.replace(self.round, ended)
        shutil.rmtree(ended)

    def undo(self) -> LearnedVersion | None:
        """Take the version before into use again, and remove the one that is; the version that is then in
        use, None where it was the first."""
        version = self.version
        kept = [each for each in self.versions if version is None or each.number < version.number]
        self._write(self._record() | {"in_use": kept[-1].number if kept else None}, kept)
        return kept[-1] if kept else None

    def forget(self) -> None:
        """Remove all that was learned, and what it was learned from."""
        (self.directory / RECORD).unlink(missing_ok=True)  # first: nothing names the rest any more
        shutil.rmtree(self.directory)

    def _write(self, record: dict[str, Any], kept: list[LearnedVersion]) -> None:
        write_json(self.directory / RECORD, record | {"versions": [asdict(version) for version in kept]})
        names = {self.heads_of(version).name for version in kept}
        for path in self.directory.glob("heads-*"):
            if path.name not in names:
                shutil.rmtree(path)

    def _record(self) -> dict[str, Any]:
        path = self.directory / RECORD
        return read_json(path) if path.exists() else {}
