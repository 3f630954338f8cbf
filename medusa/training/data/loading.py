"""From data files to documents to train on and documents to measure on, and how to look at them.

A document is a conversation in the model's format, with labels on the parts that the model itself would have
written. An answer is rendered after exactly the same text as at inference: the chat template of the messages
so far, with its generation prompt. The answer and the end-of-turn token are labels; text that the template
adds after it (a newline, say) is not, and neither is the end of a truncated answer. Reasoning and tool calls
are labels as the template writes them, since the model wrote them so. Answers that the model cannot have
written are left out and counted: an answer without the reasoning that the template opens, reasoning or tool
calls that the template does not show. Turns of one conversation form one document while each prompt continues
the text before it; where a template rewrites its history, an answer gets a document of its own. A tokenizer
without a chat template belongs to a model that continues text: a message and its answer are a text and how
the model went on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from rich.text import Text

from medusa.conversations import Message, as_template, check_template_kwargs
from medusa.files import locked, sync
from medusa.heads.calibration import AnsweredTokens
from medusa.options import differences
from medusa.prompts import default_template, reasoning_tags
from medusa.training.config import DataOptions
from medusa.training.data.dataset import (
    ONLY_IN_TRAINING,
    Dataset,
    Document,
    Documents,
    damage_of_dataset,
    name_of,
    read_dataset,
    read_documents,
    write_dataset,
    write_documents,
)
from medusa.training.data.reading import Example, read_examples

_MOST_REMEMBERED = 8
"""Largest number of different chat template options that heads record."""


@dataclass(frozen=True)
class RenderedText:
    """Text and the character ranges of it that the model wrote."""

    text: str
    written: tuple[tuple[int, int], ...]
    add_special_tokens: bool = False
    """True for plain text; a chat template writes its own."""


class Renderer:
    """Renders examples with one tokenizer's chat template; ``template_kwargs`` are defaults for examples
    without their own. ``skipped`` counts the answers left out, by reason.

    Documents are cut to ``max_length`` tokens later. Every answer is rendered with all before it, so of a
    long conversation only what such a document holds is rendered, where the template only adds to its text.
    """

    def __init__(
        self,
        tokenizer: Any,
        template_kwargs: Mapping[str, Any] | None = None,
        max_length: int | None = None,
    ):
        self.tokenizer = tokenizer
        self.template_kwargs = template_kwargs or {}
        self.max_length = max_length
        check_template_kwargs(self.template_kwargs)
        self.skipped: Counter[str] = Counter()
        self.template_options: list[dict[str, Any]] = []
        """The options used, without tools and documents: every different set."""

    def render(self, example: Example) -> list[RenderedText]:
        """The documents of one example; none when no assistant message answers anything.

        Raises:
            ValueError: the template refuses the conversation, or there is none and it is more than a text
                with its continuation.
        """
        if example.text is not None:
            return [RenderedText(example.text, ((0, len(example.text)),), True)]
        if not self.tokenizer.chat_template:
            return self._continued(example)
        example = replace(example, template_options={**self.template_kwargs, **example.template_options})
        documents: list[RenderedText] = []
        text = ""
        written = list[tuple[int, int]]()
        for index in _answer_indices(example.messages):
            if example.messages[index].get("train") is False:
                self._skip("an answer that its row takes out")
                continue
            is_cut = example.answer_was_cut and index == len(example.messages) - 1
            prompt, answer = self._answered(example, index, is_cut)
            if not answer:
                continue
            if written and not prompt.startswith(text):
                documents.append(RenderedText(text, tuple(written)))
                written = []
            elif written and not documents and self._is_full(text, example.messages[index:]):
                break
            text = prompt + answer
            written.append((len(prompt), len(text)))
        if written:
            documents.append(RenderedText(text, tuple(written)))
            template_kwargs = {
                key: value
                for key, value in example.template_options.items()
                if key not in ("tools", "documents")
            }
            if template_kwargs not in self.template_options and len(self.template_options) < _MOST_REMEMBERED:
                self.template_options.append(template_kwargs)
        return documents

    def _is_full(self, text: str, rest: Sequence[Message]) -> bool:
        """Whether ``text`` has more than ``max_length`` tokens, and ``rest`` nothing that templates leave out
        of their history."""
        if self.max_length is None or len(text) <= self.max_length or any(map(_is_left_out, rest)):
            return False
        encoded = self.tokenizer(text, add_special_tokens=False, verbose=False)
        return len(encoded["input_ids"]) > self.max_length

    def _continued(self, example: Example) -> list[RenderedText]:
        """The text of the first message and how the model continued it, as :mod:`medusa.prompts` asks a model
        without a chat template."""
        if [message["role"] for message in example.messages] != ["user", "assistant"]:
            raise ValueError(
                f"{example.origin} is a conversation and the tokenizer of {self.tokenizer.name_or_path!r} "
                "has no chat template; use a chat model, rows with 'text', or rows of one user message and "
                "its answer"
            )
        prompt, answer = (message["content"] for message in example.messages)
        reply = example.messages[1]
        unshown = "reasoning or tool calls without a template that shows them"
        for why, is_so in (
            ("an answer that its row takes out", reply.get("train") is False),
            (unshown, reply.get("reasoning_content") or reply.get("tool_calls")),
            ("an empty answer", not answer),
        ):
            if is_so:
                self._skip(why)
                return []
        text = prompt + answer + ("" if example.answer_was_cut else self.tokenizer.eos_token or "")
        return [RenderedText(text, ((len(prompt), len(text)),), True)]

    def _answered(self, example: Example, index: int, is_cut: bool) -> tuple[str, str]:
        """The prompt of the answer at ``index``, and the text that the model then wrote; None where it cannot
        have written that."""
        message = example.messages[index]
        before = example.messages[:index]
        options = dict(example.template_options)
        prompt = self._templated(before, example.origin, add_generation_prompt=True, **options)
        shown = self._shown([*before, message], example.origin, **options)
        content = message["content"].strip()
        reasoning = str(message.get("reasoning_content") or "").strip()
        calls = message.get("tool_calls")
        if not (content or reasoning or calls):
            return self._skip("an empty answer")
        is_open = self._opens_reasoning(prompt, example, index)
        if reasoning and reasoning not in shown:
            begin, end = reasoning_tags(default_template(self.tokenizer))
            if not end or calls:
                return self._skip("reasoning that the template does not show")
            # some templates remove it from earlier answers
            line = prompt.rpartition(begin)[2] if is_open else "\n"
            answer = ("" if is_open else begin + line) + reasoning
            answer += f"{line}{end}{2 * line}{content}" if content else ""
            return prompt, answer + ("" if is_cut else self._end_of_turn)
        if calls:
            plain = {key: value for key, value in message.items() if key != "tool_calls"}
            if shown == self._shown([*before, plain], example.origin, **options):
                return self._skip("tool calls that the template does not show")
        between = shown[len(prompt) :].partition(content)[0] if content in shown and content else ""
        continues = shown.startswith(prompt)
        is_meant = is_open or (continues and _TAG.search(shown[len(prompt) :] if calls else between))
        if is_meant and not reasoning and not _CLOSING.search(content):
            return self._skip("an answer without the reasoning that the template opens")
        is_raw = _CLOSING.search(content) is not None  # reasoning and answer in one, as they were decoded
        if not (reasoning or calls) and (is_raw or not (continues and between.strip())):
            # a blank that the template writes before an answer is the model's word: decoded, it may be gone
            is_blank = continues and content and not between.strip() and not message["content"][0].isspace()
            answer = (between if is_blank else "") + message["content"]
            return prompt, answer + ("" if is_cut else self._end_of_turn)
        if not continues:
            return self._skip("an answer that the template writes otherwise than the model")
        answer = shown[len(prompt) :].rstrip()
        if is_cut:
            last_text = content or reasoning
            answer = answer[: answer.rfind(last_text) + len(last_text)]
        return prompt, answer

    def _opens_reasoning(self, prompt: str, example: Example, index: int) -> bool:
        """Whether the generation prompt ends inside of a block of reasoning."""
        tags = list(_TAG.finditer(prompt, max(0, len(prompt) - 200)))
        if not tags or tags[-1].group().startswith(("</", "[/")):
            return False
        before = self._shown(example.messages[:index], example.origin, **example.template_options)
        return tags[-1].start() >= len(before)  # else a message speaks of such tags

    def _skip(self, why: str) -> tuple[str, str]:
        self.skipped[f"skipped: {why}"] += 1
        return "", ""

    @property
    def _end_of_turn(self) -> str:
        """The template's text after an answer, up to the whitespace: the end-of-turn token."""
        return self._behind_an_answer[0].rstrip()

    @cached_property
    def _behind_an_answer(self) -> tuple[str, str]:
        """The template's text after any answer, and its text at the end of a conversation.

        The second is no word of the model's: Phi-3's template writes an end of text in place of the
        generation prompt. Where it is all that ends an answer, it is the first.
        """
        answer, where = "an answer", "a question with its answer"
        messages = ({"role": "user", "content": "a question"}, {"role": "assistant", "content": answer})
        last = self._templated(messages, where).rpartition(answer)[2]
        followed = self._templated(messages, where, add_generation_prompt=True).rpartition(answer)[2]
        if followed.startswith(last):
            return last, ""
        # turn marks that begin alike are different ones: what both share ends where a token of `last` does
        pairs = enumerate(zip(last, followed, strict=False))
        shared = next((place for place, (ours, theirs) in pairs if ours != theirs), len(followed))
        encoded = self.tokenizer(last, add_special_tokens=False, return_offsets_mapping=True)
        end = max((end for _, end in encoded["offset_mapping"] if end <= shared), default=0)
        return (last[:end], last[end:]) if last[:end].strip() else (last, "")

    def _shown(self, messages: Sequence[Message], origin: str, **kwargs: Any) -> str:
        """The conversation so far, without the template's text at the end of a conversation."""
        return self._templated(messages, origin, **kwargs).removesuffix(self._behind_an_answer[1])

    def _templated(self, messages: Sequence[Message], origin: str, **kwargs: Any) -> str:
        try:
            messages = as_template(messages, self.tokenizer)
            return self.tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
        except (jinja2.TemplateError, TypeError) as error:  # TypeError: a variable is of another type
            raise ValueError(f"{origin}: the chat template refuses the conversation: {error}") from error


_TAG = re.compile(r"</?[\w:|]*(?:think|reason)\w*>|\[/?THINK\]", re.IGNORECASE)
"""The tags of reasoning in a chat template."""
_CLOSING = re.compile(r"</[\w:|]*(?:think|reason)\w*>|\[/THINK\]", re.IGNORECASE)


TEXTS_AT_ONCE = 512
"""Texts in one call of the tokenizer."""


def tokenise(tokenizer: Any, texts: Iterable[RenderedText]) -> Iterator[Document]:
    """One document per text, tokenised as a whole, in order.

    A token is a label when all of it is in a range that the model wrote, without the blanks around it that
    marks such as Phi-3's ``<|end|>`` cover.

    Raises:
        ValueError: the tokenizer cannot say which characters a token covers.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} cannot tell which characters a token covers, which the label mask "
            "needs; load a fast tokenizer"
        )
    added = tokenizer.added_tokens_decoder.items()
    marks = np.array([token for token, each in added if each.lstrip or each.rstrip], dtype=np.int64)
    for special, alike in groupby(texts, key=lambda text: text.add_special_tokens):
        while batch := list(islice(alike, TEXTS_AT_ONCE)):
            encoded = tokenizer(
                [text.text for text in batch],
                add_special_tokens=special,
                return_offsets_mapping=True,
                verbose=False,
            )
            for text, ids, offsets in zip(
                batch, encoded["input_ids"], encoded["offset_mapping"], strict=True
            ):
                # tokenizers trim spaces off the start: a token begins where the one before it ended
                ends = np.maximum.accumulate(np.asarray(offsets).reshape(-1, 2)[:, 1])
                starts = np.concatenate([[0], ends[:-1]])
                mask = np.zeros(len(ends), dtype=bool)
                starts, ends = _without_blanks(text.text, np.asarray(ids), starts, ends, marks)
                for start, end in text.written:
                    mask |= (starts >= start) & (ends <= end) & (ends > start)
                yield Document(np.asarray(ids, dtype=np.int32), mask)


def _without_blanks(
    text: str, ids: np.ndarray, starts: np.ndarray, ends: np.ndarray, marks: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The first and last characters of tokens (T,) in ``text``, without the blanks that the tokens ``marks``
    cover."""
    starts = starts.copy()
    ends = ends.copy()
    for place in np.flatnonzero(np.isin(ids, marks)):
        covered = text[starts[place] : ends[place]]
        starts[place] += len(covered) - len(covered.lstrip())
        ends[place] -= len(covered) - len(covered.rstrip())
    return starts, ends


def _is_left_out(message: Message) -> bool:
    return bool(message.get("reasoning_content") or _CLOSING.search(message["content"]))


def _answer_indices(messages: Sequence[Message]) -> Iterator[int]:
    """Assistant messages that answer something."""
    has_question = False
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and has_question:
            yield index
        has_question |= message["role"] not in ("assistant", "system")


_LOOP_NGRAM = 8
"""Number of repeated tokens from which a repetition counts as a loop; prose rarely reaches it."""


def filtered(documents: Iterable[Document], options: DataOptions, counts: Counter[str]) -> Iterator[Document]:
    """The documents kept, cut to ``max_length`` tokens. Adds what happened to the others to ``counts``."""
    seen: set[bytes] = set()
    for document in documents:
        counts["documents"] += 1
        if len(document.tokens) > options.max_length:
            counts["cut to max_length"] += 1
            document = Document(*(each[: options.max_length] for each in document))
        reason = _reason_to_drop(document, options, seen)
        if reason:
            counts[f"dropped: {reason}"] += 1
        else:
            yield document


def _reason_to_drop(document: Document, options: DataOptions, seen: set[bytes]) -> str | None:
    written = document.tokens[1:][document.is_label[1:]]
    if not len(written):
        return "no label"
    limit = options.max_repeated_fraction
    if limit is not None and _repeated_fraction(written) > limit:
        return "looping"
    if options.drop_duplicates:
        digest = hashlib.sha256(document.tokens.tobytes()).digest()
        if digest in seen:
            return "duplicate"
        seen.add(digest)
    return None


def _repeated_fraction(tokens: np.ndarray) -> float:
    """The part of the n-grams of tokens (T,) that occurred before in it; 0 for text shorter than one."""
    if len(tokens) < _LOOP_NGRAM:
        return 0.0
    ngrams = np.lib.stride_tricks.sliding_window_view(tokens, _LOOP_NGRAM)
    return 1 - len(np.unique(ngrams, axis=0)) / len(ngrams)


def held_out_indices(documents: Documents, fraction: float, at_most: int, seed: int) -> np.ndarray:
    """Indices, ascending, of the documents to measure on and never train on.

    Chosen by a hash of the prompt and ``seed``: the same prompt is always on the same side, also when other
    documents are added, until ``at_most`` is reached. The documents of at least one prompt are held out when
    ``fraction`` is above 0 and there are two different prompts.
    """
    if fraction == 0 or at_most == 0:
        return np.zeros(0, dtype=np.int64)
    places = np.array([_place(documents[index], seed) for index in range(len(documents))])
    distinct = np.unique(places)
    if len(distinct) < 2:
        return np.zeros(0, dtype=np.int64)
    limit = fraction
    if (places < limit).sum() > at_most:
        limit = np.sort(places)[at_most]
    limit = max(limit, (distinct[0] + distinct[1]) / 2)
    return (places < limit).nonzero()[0]


def _place(document: Document, seed: int) -> float:
    """A number in [0, 1) that depends on the prompt (all tokens where there is none) and the seed."""
    labels = document.is_label.nonzero()[0]
    end = labels[0] if len(labels) and labels[0] > 1 else len(document.tokens)
    digest = hashlib.sha256(str(seed).encode() + document.tokens[:end].astype("<i4").tobytes()).digest()
    return int.from_bytes(digest[:7], "big") / 2**56


TRAINED, CONTEXT = "bold green", "dim"
LEGEND = Text.assemble(
    ("trained on", TRAINED), "   ", ("context only", CONTEXT), "   · between tokens, ⏎ newline"
)


def load_data(options: DataOptions, tokenizer: Any) -> Dataset:
    """Everything ``options.data`` names: read, rendered, tokenised, filtered and split.

    Raises:
        FileNotFoundError, ValueError: a source or a row cannot be read, or nothing is left to train on.
    """
    with tempfile.TemporaryDirectory(prefix="medusa-") as directory:  # mapped files stay readable
        return read_dataset(tokenised(options, tokenizer, Path(directory)))


def tokenised(
    options: DataOptions, tokenizer: Any, directory: Path, say: Callable[[str], object] = lambda text: None
) -> Path:
    """The path of the tokenised documents in ``directory``, which are made now if missing or damaged; for one
    process. ``say`` is told what was damaged.

    No more than a batch of rows is in memory at a time.

    Raises:
        FileNotFoundError, ValueError: see :func:`load_data`.
    """
    target = directory / name_of(options, tokenizer)
    directory.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(directory)
    damage = damage_of_dataset(target) if target.exists() else None
    if target.exists() and damage is None:
        return target
    with tempfile.TemporaryDirectory(dir=directory, prefix=_SPOOL) as spool, locked(Path(spool)):
        if damage is not None:
            say(f"{damage}: the data is tokenised again")
            os.replace(target, Path(spool, "damaged"))
        written = _tokenise_into(Path(spool), target.name, options, tokenizer)
        try:
            os.replace(written, target)
        except OSError:
            if not target.exists():  # else another run has written the same meanwhile
                raise
        sync(directory)
    return target


_SPOOL = ".rows-"
"""The beginning of a directory's name in which documents are made."""


def _remove_abandoned(directory: Path) -> None:
    """Remove what runs that were killed left in ``directory``; what a run works in is locked."""
    for left in directory.glob(f"{_SPOOL}*"):
        if not (left / ".lock").exists():
            continue
        with suppress(BlockingIOError), locked(left):
            shutil.rmtree(left)


def _tokenise_into(spool: Path, name: str, options: DataOptions, tokenizer: Any) -> Path:
    """The path of a new dataset called ``name`` in ``spool``."""
    counts: Counter[str] = Counter()
    renderer = Renderer(tokenizer, options.template_kwargs, options.max_length)
    skipped: list[str] = []
    texts = _rendered(read_examples(options.data, options.data_split, skipped), renderer, counts, skipped)
    write_documents(spool / "all", filtered(tokenise(tokenizer, texts), options, counts))
    documents = read_documents(spool / "all")
    if not len(documents):
        reasons = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise ValueError(
            f"data {options.data} holds nothing to train on ({reasons}); rows need an assistant message "
            "that answers something, or text"
            if counts["rows"]
            else f"data {options.data} holds no rows"
        )
    chosen = held_out_indices(documents, options.held_out_fraction, options.max_held_out, options.seed)
    is_held_out = np.zeros(len(documents), dtype=bool)
    is_held_out[chosen] = True
    num_held_out = sum(int(documents[index].is_label.sum()) for index in chosen)
    counts.update(
        {
            "training documents": int((~is_held_out).sum()),
            "training tokens": documents.num_tokens - int(documents.lengths[chosen].sum()),
            "training labels": documents.num_labels - num_held_out,
            "held-out documents": len(chosen),
            "held-out labels": num_held_out,
        }
    )
    write_dataset(spool / name, documents, is_held_out, dict(counts), renderer.template_options)
    return spool / name


def coloured(document: Document, tokenizer: Any) -> Text:
    """The document token by token, the tokens trained on in colour."""
    text = Text()
    for token, is_label in zip(document.tokens.tolist(), document.is_label.tolist(), strict=True):
        shown = tokenizer.decode([token]).replace("\n", "⏎\n")
        text.append(shown, style=TRAINED if is_label else CONTEXT)
        text.append("" if shown.endswith("\n") else "·", style="dim blue")
    text.append(
        f"\n{int(document.is_label.sum())} of {len(document.tokens)} tokens trained on", style="italic"
    )
    return text


def _rendered(
    examples: Iterable[Example], renderer: Renderer, counts: Counter[str], skipped: Sequence[str]
) -> Iterator[RenderedText]:
    """The documents of ``examples``; ``skipped`` says of rows that could not be read what is wrong."""
    for example in examples:
        counts["rows"] += 1
        documents = renderer.render(example)
        counts["rows without an answer"] += not documents
        yield from documents
    counts.update(renderer.skipped)
    if skipped:
        counts["rows"] += len(skipped)
        counts[f"skipped: rows without text where it must be (the first: {skipped[0]})"] = len(skipped)


def held_out_answers(provenances: Mapping[str, Mapping[str, Any]], tokenizer: Any) -> list[AnsweredTokens]:
    """The conversations that training runs held out, reconstructed from the provenance of their heads: the
    intersection over all runs of ``provenances`` (by label).

    Raises:
        ValueError: some heads do not record their data, two runs held out other conversations, or the data
            have changed.
        FileNotFoundError: the data are not there.
    """
    (first, provenance), *others = provenances.items()
    options = _data_options(first, provenance)
    for label, other in others:
        both = (dataclasses.asdict(options), dataclasses.asdict(_data_options(label, other)))
        ours, theirs = ({key: each[key] for key in each if key not in ONLY_IN_TRAINING} for each in both)
        differing = differences(ours, theirs)
        if differing:
            raise ValueError(
                f"{first!r} and {label!r} held out other conversations: {'; '.join(differing)}; give "
                "--prompts that neither was trained on"
            )
    data = load_data(options, tokenizer)
    num_labels = data.counts["held-out labels"]
    recorded = provenance.get("data", {}).get("held-out labels")
    if num_labels != recorded:
        raise ValueError(
            f"the run of {first!r} held out {recorded} answer tokens, {options.data} now gives {num_labels}: "
            "the data have changed since; give --prompts instead of --held-out"
        )
    return data.held_out.answers()


def _data_options(label: str, provenance: Mapping[str, Any]) -> DataOptions:
    configuration = provenance.get("configuration", {})
    if "data" not in configuration:
        raise ValueError(
            f"the heads {label!r} do not record their training data (provenance.json), so the documents that "
            "they held out are unknown; give --prompts instead of --held-out"
        )
    names = [field.name for field in dataclasses.fields(DataOptions)]
    return DataOptions(**{name: configuration[name] for name in names if name in configuration})
