import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_chat import chat_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from medusa.text_stream import TextStream, token_bytes

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


@pytest.mark.parametrize(
    ("spelt", "decoded", "expected"),
    [
        ("Ġa", " a", b" a"),
        ("Ã", "\ufffd", b"\xc3"),
        ("ï¿½", "\ufffd", b"\xef\xbf\xbd"),
        ("<0xE2>", "\ufffd", b"\xe2"),
        ("\u2581word", "word", b" word"),
        (None, "", b""),
        ("<|end|>", "<|end|>", b"<|end|>"),
    ],
)
def test_the_bytes_of_a_token_are_its_own_where_it_is_a_part_of_a_character(spelt, decoded, expected):
    assert token_bytes(spelt, decoded) == expected
