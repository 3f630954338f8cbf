"""Tokenizers of each kind of decoder, so small that most characters of thirty scripts take several tokens."""

# ruff: noqa: RUF001

from __future__ import annotations

import functools
import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SCRIPTS = {
    "Amharic": "ሰላም ዓለም፣ እንዴት ነህ?",
    "Arabic": "مرحبا بالعالم، كيف حالك؟",
    "Armenian": "Բարեւ աշխարհ, ինչպե՞ս ես:",
    "Bengali": "ওহে বিশ্ব, কেমন আছো?",
    "Burmese": "မင်္ဂလာပါကမ္ဘာလောက",
    "Cherokee": "ᎣᏏᏲ ᎡᎶᎯ",
    "Chinese": "讨论翡翠和鳄鱼，你好世界。",
    "Coptic": "Ⲛⲟⲩϥⲣⲓ ⲡⲓⲕⲟⲥⲙⲟⲥ",
    "Cyrillic": "Привет, мир! Как дела?",
    "Devanagari": "नमस्ते दुनिया, आप कैसे हैं?",
    "Ethiopic digits": "፩ ፪ ፫",
    "Georgian": "გამარჯობა, მსოფლიო!",
    "Gothic": "𐌲𐌿𐍄𐌹𐍃𐌺 𐍂𐌰𐌶𐌳𐌰",
    "Greek": "Γειά σου Κόσμε, τι κάνεις;",
    "Gujarati": "નમસ્તે વિશ્વ, કેમ છો?",
    "Gurmukhi": "ਸਤਿ ਸ੍ਰੀ ਅਕਾਲ ਦੁਨਿਆ",
    "Hangul": "안녕하세요 세계, 잘 지내?",
    "Hebrew": "שלום עולם, מה שלומך?",
    "Hiragana": "こんにちは、せかい。",
    "Kannada": "ನಮಸ್ಕಾರ ಪ್ರಪಂಚ",
    "Katakana": "コンニチハ、セカイ。",
    "Khmer": "សួស្តីពិភពលោក",
    "Lao": "ສະບາຍດີຊາວໂລກ",
    "Latin": "Hello world, don't you agree? Yes: a-b, 3.14 (twice).",
    "Malayalam": "നമസ്കാരം ലോകം",
    "Mongolian": "ᠮᠣᠩᠭᠣᠯ ᠪᠢᠴᠢᠭ",
    "Sinhala": "ආයුබෝවන් ලෝකය",
    "Tamil": "வணக்கம் உலகம், எப்படி இருக்கிறாய்?",
    "Telugu": "హలో ప్రపంచం",
    "Thai": "สวัสดีชาวโลก สบายดีไหม",
    "Tibetan": "བཀྲ་ཤིས་བདེ་ལེགས།",
    "Vietnamese": "Chào thế giới, bạn khỏe không?",
    "emoji": "👩‍👩‍👧‍👦 and 🏳️‍🌈, 👍🏽 🇩🇪 ☕️ 1️⃣",
    "marks": "e\u0301 a\u0308\u0323 n\u0303",
    "code": "def f(x):\n    return {'a': [1,  2]}\n\n\tdone",
}
CORPUS = [SCRIPTS["Latin"], SCRIPTS["code"], "the cat and the dog, the world and you. Привет 你好 सं"] * 8
SPECIAL = ["<unk>", "<s>", "</s>"]
NAMES: dict[str, Any] = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **NAMES)


def byte_level(size: int = 420) -> Any:
    """GPT-2's, Llama 3's and Qwen's; its merges end inside of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*CORPUS, *SCRIPTS.values()], trainer)
    return _wrapped(tokenizer)


def _with_byte_fallback(decoder: Any, prepends: bool) -> Any:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    spaces = normalizers.Replace(" ", "▁")
    steps = [normalizers.Prepend("▁"), spaces] if prepends else [spaces]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoder
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL + BYTES, max_token_length=8, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # as in files of such models: bytes are tokens like others, and no control tokens
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = [each for each in described["added_tokens"] if each["content"] in SPECIAL]
    return _wrapped(Tokenizer.from_str(json.dumps(described)))


def llama_2() -> Any:
    """Byte fallback, fuse and strip: Llama 2's, Mistral's, TinyLlama's and Phi-3's."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _with_byte_fallback(decoders.Sequence(steps), prepends=True)


def gemma() -> Any:
    """Byte fallback and fuse, without strip."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _with_byte_fallback(decoders.Sequence(steps), prepends=False)


def metaspace() -> Any:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([*CORPUS, *SCRIPTS.values()], trainer)
    return _wrapped(tokenizer)


def word_piece(cleanup: bool = True) -> Any:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=cleanup)
    trainer = trainers.WordPieceTrainer(vocab_size=700, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator([*CORPUS, *SCRIPTS.values()], trainer)
    return _wrapped(tokenizer)


def word_ends() -> Any:
    """``</w>`` behind each word: the first GPT's."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator([*CORPUS, *SCRIPTS.values()], trainer)
    return _wrapped(tokenizer)


def replace_and_strip() -> Any:
    """A mark that stands for a space, and the first one dropped, without byte fallback."""
    tokenizer = metaspace().backend_tokenizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrapped(tokenizer)


@functools.cache
def sentencepiece_file() -> Path:
    """A model of SentencePiece with byte fallback."""
    import sentencepiece

    model, folder = io.BytesIO(), Path(tempfile.mkdtemp())
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        bos_id=1,
        eos_id=2,
        unk_id=0,
        pad_id=-1,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    path = folder / "spiece.model"
    path.write_bytes(model.getvalue())
    return path


def slow(name: str) -> Any:
    """One of ``transformers``' tokenizers in Python over SentencePiece."""
    import transformers

    return getattr(transformers, name)(
        vocab_file=str(sentencepiece_file()),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token=None,
    )


def slow_that_joins_bytes() -> Any:
    """As the code that comes with models on the hub decodes: SentencePiece joins the pieces itself."""
    from transformers import BertGenerationTokenizer

    class Joining(BertGenerationTokenizer):
        def convert_tokens_to_string(self, tokens: list[str]) -> str:
            return self.sp_model.decode(tokens)

    return Joining(
        vocab_file=str(sentencepiece_file()),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token=None,
    )


KINDS: dict[str, Callable[[], Any]] = {
    "byte level": byte_level,
    "byte fallback, fuse, strip (Llama 2)": llama_2,
    "byte fallback, fuse (Gemma)": gemma,
    "metaspace": metaspace,
    "replace, fuse, strip": replace_and_strip,
    "WordPiece": word_piece,
    "WordPiece as it is": functools.partial(word_piece, cleanup=False),
    "word ends": word_ends,
    "slow SentencePiece": functools.partial(slow, "BertGenerationTokenizer"),
    "slow SentencePiece that joins bytes": slow_that_joins_bytes,
}


@functools.cache
def tokenizer_of(kind: str) -> Any:
    return KINDS[kind]()
