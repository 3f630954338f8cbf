import random
from copy import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_chat import chat_tokenizer
from tokenizer_kinds import BYTES, KINDS, SCRIPTS, tokenizer_of
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from medusa.text_stream import BYTE_OF, LONGEST_WINDOW, AnswerText, TextStream, token_bytes

TOKENIZER = chat_tokenizer()


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=30))
def test_streamed_pieces_join_to_the_whole_text_and_never_show_half_a_character(text):
    stream = TextStream(TOKENIZER)
    pieces = [stream.feed(token) for token in TOKENIZER(text, add_special_tokens=False).input_ids]
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == text


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 259), max_size=30))
def test_streaming_any_tokens_gives_the_tokenizers_own_decoding(tokens):
    stream = TextStream(TOKENIZER)
    streamed = "".join(map(stream.feed, tokens)) + stream.finish()
    assert streamed == TOKENIZER.decode(tokens, skip_special_tokens=True)


def test_words_keep_their_spaces_where_a_lone_token_would_lose_its_own():
    pieces = Tokenizer(models.WordLevel({"\u2581one": 0, "\u2581two": 1, "<end>": 2}, unk_token="<end>"))
    pieces.decoder = decoders.Metaspace()
    stream = TextStream(PreTrainedTokenizerFast(tokenizer_object=pieces))
    assert [stream.feed(token) for token in (0, 1, 1)] == ["one", " two", " two"]


def test_text_appears_as_soon_as_it_is_certain():
    stream = TextStream(TOKENIZER)
    assert [stream.feed(token) for token in TOKENIZER("aé😀").input_ids] == ["a", "", "é", "", "", "", "😀"]


def made_by(kind):
    """The tokenizer of a kind; skips where it needs a library that is not installed."""
    if "SentencePiece" in kind:
        pytest.importorskip("sentencepiece")
    return tokenizer_of(kind)


def decoded(tokenizer, tokens, skips=True):
    return tokenizer.decode(tokens, skip_special_tokens=skips, clean_up_tokenization_spaces=False)


def runs_of(tokenizer):
    """Tokens of thirty scripts and any tokens; where there is byte fallback, texts in bytes and any bytes."""
    drawn = random.Random(0)
    yield from (tokenizer(text, add_special_tokens=False)["input_ids"] for text in SCRIPTS.values())
    spelling = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    ids = {int(each[3:5], 16): token for token, each in enumerate(spelling) if each in BYTES}
    if ids:
        yield from ([ids[byte] for byte in text.encode()] for text in SCRIPTS.values())
    for _ in range(150):
        some = [*ids.values()] if ids and drawn.random() < 0.5 else range(len(tokenizer))
        yield [
            drawn.choice(some) if drawn.random() < 0.8 else drawn.randrange(len(tokenizer))
            for _ in range(drawn.randrange(1, 24))
        ]


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_text_is_the_tokenizers_own_wherever_it_is_cut_and_is_never_taken_back(kind):
    tokenizer = made_by(kind)
    for tokens in runs_of(tokenizer):
        stream, streamed = TextStream(tokenizer), ""
        whole = decoded(tokenizer, tokens)
        for index, token in enumerate(tokens):
            streamed += stream.feed(token)
            assert whole.startswith(streamed), tokens
            assert streamed + copy(stream).finish() == decoded(tokenizer, tokens[: index + 1]), tokens
        assert streamed + stream.finish() == whole


def long_runs_of(tokenizer):
    """Hundreds of tokens: bytes of characters that break off, control tokens, and both."""
    drawn = random.Random(0)
    broken = [token for token in range(len(tokenizer)) if "\ufffd" in decoded(tokenizer, [token])]
    control = tokenizer.all_special_ids
    for share in (0, 0.1, 0.9, 1):
        yield [drawn.choice(control if drawn.random() < share else broken or control) for _ in range(300)]
    spelling = {
        each: token for token, each in enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    }
    letter = {byte: spelling[each] for each, byte in BYTE_OF.items() if each in spelling}
    for begun in ([0xF0, 0x9F], [0xF0, 0x9F, 0x98], [0x80]):  # characters that never end
        run = [letter[byte] for byte in begun if byte in letter]
        yield [*run[-1:], *run * 100]


@pytest.mark.parametrize("kind", KINDS)
def test_after_hundreds_of_broken_bytes_a_token_decodes_no_longer_text_than_before(kind):
    tokenizer = made_by(kind)
    for tokens in long_runs_of(tokenizer):
        stream = TextStream(tokenizer)
        whole = decoded(tokenizer, tokens)
        streamed = ""
        for token in tokens:
            streamed += stream.feed(token)
            assert whole.startswith(streamed)
            assert stream._in_bytes or len(stream._window) <= LONGEST_WINDOW
        assert streamed + stream.finish() == whole


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_all_tokens_are_the_text(kind):
    tokenizer = made_by(kind)
    if kind == "slow SentencePiece":
        pytest.skip(
            "it drops the spaces at both ends of whatever it decodes, and bytes stay as they are spelt"
        )
    for tokens in runs_of(tokenizer):
        text = decoded(tokenizer, tokens, skips=False)
        parts = [token_bytes(tokenizer, *pair) for pair in zip(tokens, [None, *tokens], strict=False)]
        if "\ufffd" not in text:  # a byte for a space at the start is one that some strip
            assert b"".join(parts).decode().removeprefix(" ") == text.removeprefix(" "), tokens


@pytest.mark.parametrize("kind", KINDS)
def test_marks_and_stop_strings_leave_the_text_beside_them_as_it_is(kind):
    tokenizer = made_by(kind)
    mark = tokenizer.convert_tokens_to_ids("</s>")
    for name in ("Chinese", "Burmese", "Latin", "emoji"):
        tokens = tokenizer(SCRIPTS[name], add_special_tokens=False)["input_ids"]
        whole = decoded(tokenizer, tokens)
        middle = len(tokens) // 2
        while "\ufffd" in decoded(tokenizer, tokens[:middle]):  # between two characters
            middle += 1
        answer = AnswerText(tokenizer, marks={mark: "<m>"})
        given = [*tokens[:middle], mark, *tokens[middle:]]
        _, pieces = answer.feed(given, [0] * len(given))
        text = "".join(each.text for each in [*pieces, *answer.finish()])
        assert text.replace("<m>", "") == whole and "<m>" in text

        stop = whole[len(whole) // 2 :][:2]
        answer = AnswerText(tokenizer, [stop])
        _, pieces = answer.feed(tokens, [0] * len(tokens))
        text = "".join(each.text for each in [*pieces, *answer.finish()])
        assert text == whole[: whole.find(stop)] and answer.is_stopped


@pytest.mark.parametrize(
    ("kind", "spelt", "before", "expected"),
    [
        ("byte level", "Ġa", None, b" a"),
        ("byte level", "Ã", None, b"\xc3"),
        ("byte fallback, fuse, strip (Llama 2)", "<0xE2>", None, b"\xe2"),
        ("byte fallback, fuse, strip (Llama 2)", "▁you", None, b"you"),
        ("byte fallback, fuse, strip (Llama 2)", "▁you", "e", b" you"),
        ("byte fallback, fuse, strip (Llama 2)", "▁you", "<0xE2>", b" you"),
        ("WordPiece", "##e", "a", b"e"),
        ("WordPiece", ".", "a", b"."),
        ("byte level", "</s>", "Ġa", b"</s>"),
    ],
)
def test_the_bytes_of_a_token_are_its_own_where_it_is_a_part_of_a_character(kind, spelt, before, expected):
    tokenizer = tokenizer_of(kind)
    token, last = (tokenizer.get_vocab()[each] if each else None for each in (spelt, before))
    assert token_bytes(tokenizer, token, last) == expected


def test_a_token_that_the_vocabulary_lacks_has_no_bytes():
    assert token_bytes(TOKENIZER, 10_000) == b""
