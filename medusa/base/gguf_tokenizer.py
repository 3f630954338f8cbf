"""The tokenizer of a model in a GGUF file, as one of ``transformers``, and the tokens that end its answers.

A file has the vocabulary, and merges or scores; it names how text is split, and which tokens are special. The
ids are those of the model's own tokenizer, and of llama.cpp, which says what a file means.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from medusa.base.gguf_file import INFILL_TOKENS, GGUFFile
from medusa.console import log_console

END_TOKENS = frozenset(
    {
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<|END_OF_TURN_TOKEN|>",
        "<end_of_turn>",
        "<turn|>",
        "<end_of_utterance>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "[|endofturn|]",
        "[e~[",
    }
)
"""Tokens that end an answer in every vocabulary that has them, but for :data:`NO_ENDS`: a file names one of
them only, and may say that another is plain text."""
CONTROL_ENDS = frozenset({"</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|tool_response>"})
"""Tokens that end an answer where the file says that they are control tokens; elsewhere they may be text, as
Gemma's ``</s>`` is."""
NO_ENDS = (
    ("<|end|>", frozenset({"<|return|>", "<|call|>"})),  # gpt-oss: it closes a message, reasoning too
    ("<|end|>", frozenset({"<|calls|>", "<|flush|>"})),  # Solar Open likewise
    ("</s>", frozenset({"<|tool_response>"})),  # Gemma 4
)
"""Tokens that end no answer in vocabularies that have the others."""
TURN_STARTS = frozenset({"<start_of_turn>", "<|turn>"})
"""Marks of other forms than :data:`MARK` that begin a turn."""
MARK = re.compile(r"<\|[^\s<>|]+\|>|<\uff5c[^\s<>\uff5c]+\uff5c>|\[\|[^\s\[\]|]+\|\]")
"""The form of marks in chat templates that are no text: those that the converter of llama.cpp takes for
control tokens, and EXAONE's. Tags such as ``<think>`` are text."""
PLAIN_SPLITS = frozenset({None, "default", "gpt-2"})
"""Names of the split of GPT-2."""
DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
"""Names of splits that take digits one by one, and the rest as GPT-2."""
NFC_SPLITS = frozenset({"qwen2", "qwen35", "deepseek-r1-qwen"})
"""Kinds of splits before which the tokenizers of ``transformers`` compose characters (NFC); a file does not
say so."""
WITHOUT_PREFIX = frozenset({"gemma", "gemma2", "gemma3"})
"""Architectures whose SentencePiece tokenizers put no space before the text, whatever the file says."""
TOKENS = "tokenizer.ggml.tokens"
MERGES = "tokenizer.ggml.merges"
TEMPLATE = "tokenizer.chat_template"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
"""Types of tokens, as ``tokenizer.ggml.token_type`` numbers them."""
SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""The names of files for the special tokens of ``transformers``."""


def gguf_tokenizer(file: GGUFFile) -> Any:
    """The tokenizer of the model in ``file``, with its chat template or, where it has several, its templates
    by name.

    Raises:
        ValueError: the file has none, or one of an unknown kind.
    """
    if TOKENS not in file.arrays_of_strings:
        raise ValueError(f"{file.path} has no tokenizer; give one: --tokenizer DIRECTORY")
    kind = file.metadata.get("tokenizer.ggml.model")
    templates = chat_templates(file)
    try:
        types = token_types(file)
        backend = _byte_level(file, types) if kind == "gpt2" else _sentencepiece(file, kind, types)
        settings = {name: _special_token(file, of_file) for name, of_file in SPECIAL_TOKENS.items()}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(
            f"the tokenizer in {file.path} cannot be read ({type(error).__name__}: {error}); "
            "give one: --tokenizer DIRECTORY"
        ) from error
    texts_by_type: dict[int, list[str]] = {CONTROL: [], USER_DEFINED: []}
    for text, type_of_token in zip(file.tokens, types, strict=True):
        if type_of_token in texts_by_type:
            texts_by_type[type_of_token].append(_searched(file, text, type_of_token))
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in texts_by_type[CONTROL]])
    backend.add_tokens([AddedToken(text, normalized=False) for text in texts_by_type[USER_DEFINED]])
    # without a name: transformers would ask the hub for a large vocabulary's, and there is none of a file
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_Given(backend),
        add_bos_token=_adds(file, "bos", by_default=kind == "llama"),
        add_eos_token=_adds(file, "eos", by_default=False),
        **settings,
    )
    tokenizer.chat_template = templates.get("default") if templates.keys() <= {"default"} else templates
    tokenizer.name_or_path = str(file.path)
    tokenizer.clean_up_tokenization_spaces = False
    infill_tokens = _infill_tokens(file)
    if infill_tokens is not None:
        tokenizer.init_kwargs[INFILL_TOKENS] = infill_tokens
    return tokenizer


class _Given:
    """A backend for ``transformers`` to keep: it would copy it, which takes as long as making it."""

    def __init__(self, backend: Tokenizer):
        self._backend = backend

    def __deepcopy__(self, memo: object) -> Tokenizer:
        return self._backend


def _special_token(file: GGUFFile, name: str) -> str | None:
    token = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return None if token is None else file.tokens[token]


def _adds(file: GGUFFile, name: str, *, by_default: bool) -> bool:
    """Whether the tokenizer puts its BOS or EOS token around a text."""
    if file.metadata.get("tokenizer.ggml.model") == "gemma4":
        return False  # the template writes <bos> itself
    return bool(file.metadata.get(f"tokenizer.ggml.add_{name}_token", by_default))


def chat_templates(file: GGUFFile) -> dict[str, str]:
    """The chat templates of ``file`` by name, of which most have ``default`` alone; empty where it has
    none."""
    return {
        key.removeprefix(TEMPLATE).removeprefix(".") or "default": str(text)
        for key, text in sorted(file.metadata.items())
        if key == TEMPLATE or key.startswith(f"{TEMPLATE}.")
    }


def token_types(file: GGUFFile) -> list[int]:
    """The type of each token, (V,) long: what the file says, but for marks of turns, which are control tokens
    whatever it says, as in llama.cpp: answers would show them, and not end. ``<unk>`` is one too.

    Raises:
        ValueError: tokens lack a type.
    """
    known = [NORMAL] * len(file.tokens)
    if "tokenizer.ggml.token_type" in file.metadata:
        known = _numbers(file, "tokenizer.ggml.token_type")
    known = [CONTROL if kind == UNKNOWN else kind for kind in known]
    written = {mark for template in chat_templates(file).values() for mark in MARK.findall(template)}
    for mark in (*END_TOKENS, *TURN_STARTS, *written):
        if mark in file.token_ids:
            known[file.token_ids[mark]] = CONTROL
    return known


def _numbers(file: GGUFFile, key: str) -> list[Any]:
    """A number of each token, (V,) long.

    Raises:
        ValueError: the file has none, or fewer.
    """
    numbers = file.metadata.get(key)
    if not isinstance(numbers, list) or len(numbers) < len(file.tokens):
        raise ValueError(
            f"GGUF file {file.path} is damaged: {key} must have a number for each of {len(file.tokens)} "
            "tokens; copy or download it again"
        )
    return numbers[: len(file.tokens)]


def end_tokens(file: GGUFFile) -> list[int]:
    """The ids of the tokens that end an answer: those that the file names, :data:`END_TOKENS` and
    :data:`CONTROL_ENDS`, without :data:`NO_ENDS`."""
    keys = (f"tokenizer.ggml.{name}" for name in ("eos_token_id", "eot_token_id", "eom_token_id"))
    listed = file.metadata.get("tokenizer.ggml.eos_token_ids", [])  # as Ollama writes them
    named = [*map(file.metadata.get, keys), *(listed if isinstance(listed, list) else [listed])]
    ends = {token for token in named if isinstance(token, int)}
    if TOKENS not in file.arrays_of_strings:
        return sorted(ends)
    ids = file.token_ids
    types = token_types(file)
    ends |= {ids[text] for text in END_TOKENS & ids.keys()}
    ends |= {ids[text] for text in CONTROL_ENDS & ids.keys() if types[ids[text]] == CONTROL}
    ends -= {ids[text] for text, others in NO_ENDS if text in ids and others <= ids.keys()}
    return sorted(ends)


def _infill_tokens(file: GGUFFile) -> dict[str, Any] | None:
    """The value of :data:`INFILL_TOKENS` for ``file``; None where it does not say all of them."""
    tokens = {}
    for name in ("pre", "suf", "mid", "pad", "sep", "rep"):
        token = file.metadata.get(f"tokenizer.ggml.fim_{name}_token_id")
        if isinstance(token, int) and 0 <= token < len(file.tokens):
            tokens[name] = file.tokens[token]
    if not {"pre", "suf", "mid"} <= tokens.keys():
        return None
    lists = {"others": "pad", "files": "sep", "repositories": "rep"}
    return {
        **{"prefix": tokens["pre"], "suffix": tokens["suf"], "middle": tokens["mid"]},
        **{key: [tokens[name]] for key, name in lists.items() if name in tokens},
    }


# ------------------------------------------------------------------ kinds of vocabularies


def _byte_level(file: GGUFFile, types: list[int]) -> Tokenizer:
    """The backend of a vocabulary whose tokens are bytes, each written as a character."""
    characters = bytes_to_unicode()
    alphabet = frozenset(characters.values())
    # special tokens stand as they are: text is searched for them before it becomes bytes
    vocabulary = {
        text
        if kind in (CONTROL, USER_DEFINED) or alphabet.issuperset(text)
        else "".join(characters[byte] for byte in text.encode()): token
        for token, (text, kind) in enumerate(zip(file.tokens, types, strict=True))
    }
    model = BPE(vocabulary, _merges(file, vocabulary), continuing_subword_prefix="", end_of_word_suffix="")
    backend = Tokenizer(model)
    backend.decoder = decoders.ByteLevel()
    split = file.metadata.get("tokenizer.ggml.pre")
    backend.pre_tokenizer = _split(file, split)
    if split in NFC_SPLITS:
        backend.normalizer = normalizers.NFC()
    return backend


def _split(file: GGUFFile, name: str | None) -> pre_tokenizers.PreTokenizer:
    """The split of text before a byte-level vocabulary that a file calls ``name``."""
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in GGUF_PRE_TOKENIZER_SPLITS:
        pattern = Regex(GGUF_PRE_TOKENIZER_SPLITS[name])
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), whole])
    if name in DIGITS_APART:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    if name not in PLAIN_SPLITS:
        log_console().print(
            f"{file.path.name} splits text before its tokenizer as {name!r}, which is not known here: "
            "it is split as GPT-2 splits it, and some tokens may be others; --tokenizer DIRECTORY gives "
            "the model's own",
            soft_wrap=True,
        )
    return plain


def _sentencepiece(file: GGUFFile, kind: str | None, types: list[int]) -> Tokenizer:
    """The backend of a vocabulary of SentencePiece, whose tokens are characters, with a bar in place of a
    space, and bytes for those that it lacks."""
    if kind not in ("llama", "gemma4"):
        raise ValueError(f"it is of kind {kind!r}, and gpt2, llama and gemma4 are read")
    vocabulary = {_searched(file, text, types[token]): token for text, token in file.token_ids.items()}
    merges = _merges(file, vocabulary) if MERGES in file.arrays_of_strings else _merges_of_scores(file, types)
    unknown = _special_token(file, "unknown")
    backend = Tokenizer(BPE(vocabulary, merges, fuse_unk=True, unk_token=unknown, byte_fallback=True))
    puts_space = kind == "llama" and file.architecture not in WITHOUT_PREFIX
    puts_space = puts_space and file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    bar = normalizers.Replace(" ", "\u2581")
    if file.architecture == "phi3":  # a space before a text that begins with one too
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), bar])
        puts_space = True
    elif puts_space:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme="first", split=False)
    else:
        backend.normalizer = bar
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    stripped = [decoders.Strip(content=" ", left=1)] if puts_space else []
    backend.decoder = decoders.Sequence([*parts, *stripped])
    return backend


def _searched(file: GGUFFile, text: str, kind: int) -> str:
    """The text that a token is searched for with: spaces where a user-defined one of a vocabulary of scores
    is a run of bars, as the converter of llama.cpp has written them since 2024."""
    has_scores = file.metadata.get("tokenizer.ggml.model") == "llama" and MERGES not in file.arrays_of_strings
    is_run = kind == USER_DEFINED and re.fullmatch("\u2581{2,}", text) is not None
    return text.replace("\u2581", " ") if has_scores and is_run else text


def _merges(file: GGUFFile, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """The merges of ``file``, the first that is made first.

    Raises:
        ValueError: one makes a token that the vocabulary lacks.
    """
    merges = []
    for merge in file.texts(MERGES):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocabulary.keys():
            raise ValueError(f"the merge {merge!r} is of a token that the vocabulary lacks")
        merges.append((left, right))
    return merges


def _merges_of_scores(file: GGUFFile, types: list[int]) -> list[tuple[str, str]]:
    """The merges of a vocabulary that has scores: of all pairs beside each other, that with the best score is
    made first.

    User-defined tokens, such as Gemma's runs of spaces, are made by none: text is searched for them before.
    """
    scores = _numbers(file, "tokenizer.ggml.scores")
    apart = (CONTROL, USER_DEFINED, BYTE)
    tokens = [token for token, kind in enumerate(types) if kind not in apart]
    tokens.sort(key=lambda token: -scores[token])
    pieces = {file.tokens[token] for token in tokens}
    return [
        (text[:cut], text[cut:])
        for text in (file.tokens[token] for token in tokens)
        for cut in range(1, len(text))
        if text[:cut] in pieces and text[cut:] in pieces
    ]
