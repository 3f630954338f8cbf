"""Tokenizers of every kind that causal language models have, and chat templates of every form, both tiny."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS, END, ASKS, SAYS = "<s>", "</s>", "<|end|>", "<|user|>", "<|assistant|>"
MARKS = (BOS, EOS, END, ASKS, SAYS)
TEXTS = [
    "Sure, here are three rivers: the Rhine, the Nile and the Mekong.",
    "Name three rivers. Which is the longest? The Nile is the longest river. USER: ASSISTANT: [INST] [/INST]",
    "讨论翡翠和鳄鱼 Größe naïve café",
    "def f(x):\n    return x + 1\n",
    "sure here are the rivers name which is",
] * 4
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_SENTENCEPIECE = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def _trained(model, trainer, pre_tokenizer=None, normalizer=None, decoder=None) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoder
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def byte_level(**options) -> Tokenizer:
    """GPT-2's, Llama 3's, Qwen's."""
    given = {"add_prefix_space": False, **options}
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    return _trained(models.BPE(), trainer, pre_tokenizers.ByteLevel(**given), decoder=decoders.ByteLevel())


def byte_fallback(prepends: bool = True) -> Tokenizer:
    """Llama 2's, Mistral's and Phi-3's; without a space before the text Gemma's."""
    spaces = [normalizers.Replace(" ", "▁")]
    given = normalizers.Sequence([normalizers.Prepend("▁"), *spaces] if prepends else spaces)
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False, special_tokens=["<unk>", *BYTES], limit_alphabet=60
    )
    split = pre_tokenizers.Split(Regex("(?<!▁)(?=▁)"), "isolated")
    model = models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    last = [decoders.Strip(" ", 1, 0)] if prepends else []
    tokenizer = _trained(model, trainer, split, given, decoders.Sequence([*_SENTENCEPIECE, *last]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return tokenizer


def metaspace(scheme: str) -> Tokenizer:
    """Newer SentencePiece tokenizers: Mistral's later ones, TinyLlama's."""
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, special_tokens=["<unk>", *BYTES])
    model = models.BPE(unk_token="<unk>", byte_fallback=True)
    pre = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    pre_when_trained = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme)
    tokenizer = _trained(
        model, trainer, pre_when_trained, decoder=decoders.Metaspace("▁", prepend_scheme=scheme)
    )
    tokenizer.pre_tokenizer = pre
    return tokenizer


def unigram() -> Tokenizer:
    """T5's and XLNet's."""
    trainer = trainers.UnigramTrainer(
        vocab_size=300, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"]
    )
    pre = pre_tokenizers.Metaspace("▁", prepend_scheme="always")
    return _trained(models.Unigram(), trainer, pre, normalizers.NFKC(), decoders.Metaspace("▁"))


TOKENIZERS = {
    "byte level": byte_level,
    "byte level with a space before": functools.partial(byte_level, add_prefix_space=True),
    "byte level without a pattern": functools.partial(byte_level, use_regex=False),
    "byte fallback": byte_fallback,
    "byte fallback without a space before": functools.partial(byte_fallback, prepends=False),
    "metaspace always": functools.partial(metaspace, "always"),
    "metaspace first": functools.partial(metaspace, "first"),
    "metaspace never": functools.partial(metaspace, "never"),
    "unigram": unigram,
}
STRIPS = {
    "as they are": {},
    "blanks behind": {"rstrip": True},
    "blanks before": {"lstrip": True},
    "blanks around": {"lstrip": True, "rstrip": True},
}
"""What else the marks of a turn cover."""


@functools.cache
def tokenizer_of(kind: str, strips: str, template: str) -> PreTrainedTokenizerFast:
    """A tokenizer with the marks of a turn and a chat template, each by its name."""
    wrapped = PreTrainedTokenizerFast(tokenizer_object=TOKENIZERS[kind]())
    marks = [AddedToken(each, special=True, normalized=False, **STRIPS[strips]) for each in MARKS]
    wrapped.add_special_tokens(
        {"bos_token": marks[0], "eos_token": marks[1], "extra_special_tokens": marks[2:]}
    )
    wrapped.chat_template = TEMPLATES[template]
    return wrapped


def _turns(asks: str, says: str, begin: str = "", add: str = "") -> str:
    return (
        f"{begin}{{% for message in messages %}}{{% if message.role == 'user' %}}{asks}{{% else %}}{says}"
        f"{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}{add}{{% endif %}}"
    )


TEMPLATES = {
    "ChatML": _turns(
        "<|user|>\n{{ message.content }}<|end|>\n", "<|assistant|>\n{{ message.content }}<|end|>\n",
        add="<|assistant|>\n",
    ),
    "Phi 3": _turns(
        "<|user|>\n{{ message.content }}<|end|>\n", "<|assistant|>\n{{ message.content }}<|end|>\n",
        add="<|assistant|>\n{% else %}{{ eos_token }}",
    ),
    "without newlines": _turns(
        "<|user|>{{ message.content }}<|end|>",
        "<|assistant|>{{ message.content }}<|end|>",
        add="<|assistant|>",
    ),
    "Llama 2": _turns(
        "<s>[INST] {{ message.content.strip() }} [/INST]", " {{ message.content.strip() }} </s>"
    ),
    "Mistral": _turns("[INST] {{ message.content }} [/INST]", "{{ message.content }}</s>", "<s>"),
    "Mistral with a space": _turns(
        "[INST] {{ message.content }} [/INST]", " {{ message.content }}</s>", "<s>"
    ),
    "GLM": _turns(
        "<|user|>\n{{ message.content }}", "<|assistant|>\n{{ message.content }}<|end|>", add="<|assistant|>"
    ),
    "Vicuna": _turns(
        "USER: {{ message.content }} ", "ASSISTANT: {{ message.content }}</s>", "<s>", "ASSISTANT:"
    ),
    "Zephyr": _turns(
        "<|user|>\n{{ message.content }}</s>\n", "<|assistant|>\n{{ message.content }}</s>\n",
        add="<|assistant|>\n",
    ),
}  # fmt: skip
