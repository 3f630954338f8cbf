"""Filling in the middle: the tokens by which a tokenizer marks the text before and after a gap.

Models for code are trained with such tokens, each family with its own names and its own order. They are known
by their names in the vocabulary, or because the tokenizer's file says which they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from medusa.base.gguf_file import INFILL_TOKENS


@dataclass(frozen=True)
class _Family:
    """The names of the tokens of some models."""

    prefix: str
    suffix: str
    middle: str = ""
    """Begins the gap; empty where the text before the gap comes last, and the gap follows at once."""
    others: tuple[str, ...] = ()
    """Further tokens that end the text in a gap, where the vocabulary has them."""
    files: tuple[str, ...] = ()
    """Tokens before the name of a file, of which a vocabulary has one."""
    repositories: tuple[str, ...] = ()
    """Tokens before the name of a repository, likewise."""


FAMILIES = (
    _Family(  # Qwen2.5-Coder, CodeGemma, Granite 4
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|fim_pad|>", "<|endoftext|>"),
        ("<|file_sep|>", "<|file_separator|>"),
        ("<|repo_name|>",),
    ),
    _Family(  # StarCoder, Granite Code
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ("<fim_pad>", "<|endoftext|>"),
        ("<file_sep>", "<filename>"),
        ("<repo_name>", "<reponame>"),
    ),
    _Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<fim-pad>", "<|endoftext|>")),  # SantaCoder
    _Family(  # DeepSeek-Coder
        "<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"
    ),
    _Family("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", ("\u2581<EOT>",)),  # CodeLlama
    _Family("[PREFIX]", "[SUFFIX]", others=("[MIDDLE]",)),  # Codestral: suffix first
)
SNIPPET, PROJECT, FILE = "\n\n--- snippet ---\n\n", "myproject\n", "filename\n"
"""llama.cpp's words around texts that are shown before the one with the gap."""
_APART = "\u263a"
"""Text that is a part of no word: what follows it is tokenised by itself, without a space before it."""


@dataclass(frozen=True)
class InfillTokens:
    """The tokens of one vocabulary by which a gap is marked."""

    prefix: int
    suffix: int
    middle: int | None
    """None where there is none, and the suffix comes first."""
    ends: frozenset[int]
    """Tokens that end the text in a gap: those of the marks, and of the next file."""
    names: frozenset[str]
    """The texts of all of these."""
    file: int | None = None
    """Begins a file, with its name; None where there is none."""
    repository: int | None = None
    """Begins a repository, likewise."""

    def prompt(self, start: Sequence[int], before: Sequence[int], after: Sequence[int]) -> list[int]:
        """The prompt whose answer belongs between ``before`` and ``after``; ``start`` begins every prompt of
        the model."""
        if self.middle is None:
            return [*start, self.suffix, *after, self.prefix, *before]
        return [*start, self.prefix, *before, self.suffix, *after, self.middle]

    def context(self, files: Sequence[tuple[str, str]], tokens_of: Callable[[str], list[int]]) -> list[int]:
        """Other ``files``, names and texts, before a text with a gap, as llama.cpp writes them: as a
        repository, or each behind a line, for models that know no files."""
        if self.file is None:
            return [token for _, text in files for token in tokens_of(SNIPPET + text)]
        tokens = [] if self.repository is None else [self.repository, *tokens_of(PROJECT)]
        for name, text in files:
            tokens += [self.file, *tokens_of(f"{name}\n"), *tokens_of(text)]
        return [*tokens, self.file, *tokens_of(FILE)] if files else []

    def asks(self, prompt: Collection[int]) -> bool:
        """Whether ``prompt`` has the marks of a gap."""
        marks = {self.prefix, self.suffix} | ({self.middle} if self.middle is not None else set())
        return marks.issubset(prompt)


def infill_tokens(tokenizer: Any, vocab_size: int) -> InfillTokens | None:
    """The infill tokens of ``tokenizer`` that a model of ``vocab_size`` has; None where there are none."""
    known = {name: token for name, token in tokenizer.get_vocab().items() if token < vocab_size}
    own_names = tokenizer.init_kwargs.get(INFILL_TOKENS)
    for family in (*FAMILIES, *([] if own_names is None else [_Family(**own_names)])):
        marks = [family.prefix, family.suffix, *filter(None, [family.middle])]
        if all(name in known for name in marks):
            others = (*family.others, *family.files, *family.repositories)
            names = [name for name in (*marks, *others) if name in known]
            return InfillTokens(
                prefix=known[family.prefix],
                suffix=known[family.suffix],
                middle=known[family.middle] if family.middle else None,
                ends=frozenset(known[name] for name in names),
                names=frozenset(names),
                file=next((known[name] for name in family.files if name in known), None),
                repository=next((known[name] for name in family.repositories if name in known), None),
            )
    return None


def start_tokens(tokenizer: Any) -> list[int]:
    """The tokens that ``tokenizer`` puts before every text, such as the one for its beginning."""
    whole = tokenizer("a")["input_ids"]
    alone = tokenizer("a", add_special_tokens=False)["input_ids"]
    at = next((at for at in range(len(whole)) if whole[at : at + len(alone)] == alone), 0)
    return list(whole[:at])


def tokens_after(tokenizer: Any, text: str) -> list[int]:
    """``text`` as tokens, without the space that SentencePiece puts before a text: the models whose tokenizer
    does so were trained with none behind a mark."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    letter = tokenizer.convert_ids_to_tokens(tokenizer("a", add_special_tokens=False)["input_ids"])
    if not letter[0].startswith("\u2581"):
        return list(ids)
    alone, joined = (
        tokenizer(each, add_special_tokens=False)["input_ids"] for each in (_APART, _APART + text)
    )
    return list(joined[len(alone) :] if joined[: len(alone)] == alone else ids)
