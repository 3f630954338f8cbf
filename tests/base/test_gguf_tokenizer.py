import heapq
import json
import random
import re
from pathlib import Path

import pytest
from huggingface_hub import constants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quantised_files import write_model
from tiny_gguf import LETTERS, write_vocabulary
from tokenizer_kinds import SCRIPTS
from transformers import AutoTokenizer

from medusa.base.gguf_file import GGUFFile
from medusa.base.loading import load_tokenizer
from medusa.prompts import split_reasoning
from medusa.serving.infill import infill_tokens

gguf_tokenizer = pytest.importorskip(
    "medusa.base.gguf_tokenizer", exc_type=ImportError, reason="needs a newer transformers"
)
end_tokens = gguf_tokenizer.end_tokens

CODE = [
    "for (int i = 0; i < 1024; i++) { sum += a[i] * b[i]; }",
    "#include <stdio.h>\n\nint main(void) {\n\treturn 0;\n}\n",
    'fn main() {\n    println!("{:>8.3}", 3.14159_f64);\n}',
    "SELECT name, COUNT(*) FROM users WHERE id IN (1, 22, 333) GROUP BY name;",
    "const f = async (x) => await fetch(`https://example.org/${x}?a=1&b=2`);",
    "<div class='a b'>\n  <p>1,234.50 &euro;</p>\n</div>",
    "package main\n\nfunc main() {\n\tfmt.Println(0xFF, 1e-9)\n}",
    "public static void main(String[] args) throws IOException {",
    'if [[ -n "$HOME" ]]; then echo ~/.bashrc | xargs -n1; fi',
    "let rec fact n = if n <= 1 then 1 else n * fact (n - 1)",
    "x = {'key': [1, 2, 3], \"other\": None}  # a comment\n",
    "\\begin{equation} e^{i\\pi} + 1 = 0 \\end{equation}",
    "   leading and trailing   ",
    "\n\n\n",
    "a\r\nb\r\n",
    "don't I'll we've they'RE",
    "2026-11-27T12:34:56Z",
    "12345678901234567890",
    "MixedCASE snake_case camelCase kebab-case",
    "<|im_start|>user\nhi<|im_end|>\n",
    "\u00a0non-breaking\u2003spaces\u200b",
]


RUNS = [character * count for character in " \n\t-=_#*a0.\u00a0\u00e9\u4e2d\u2550" for count in range(1, 201)]
"""One character again and again, as in indents, tables and lines of dashes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_the_tokenizer_is_the_one_that_transformers_reads(model):
    ours, theirs = load_tokenizer(model), AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
    for text in ("the thin man", "Ünïcode 你好 🙂\n\n  x=12", "<|im_start|>user\nhi<|im_end|>"):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
        assert ours.decode(ours(text)["input_ids"]) == text
    # Qwen's own tokenizer composes characters first, which the file does not say
    assert ours("e\u0301")["input_ids"] == ours("\u00e9")["input_ids"]
    asked = [{"role": "user", "content": "why?"}]
    assert ours.apply_chat_template(asked, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_every_token_that_ends_an_answer_is_known_and_no_other(model):
    assert end_tokens(GGUFFile.open(model)) == [256, 258]  # <|endoftext|> and <|im_end|>


def test_no_hub_is_asked_about_a_large_vocabulary(tmp_path):
    assert constants.is_offline_mode()
    tokens = [*LETTERS, *(f"t{n}" for n in range(100_000))]
    path = write_vocabulary(tmp_path / "large.gguf", tokens, merges=["t 1"], eos=5)
    tokenizer = load_tokenizer(path)
    assert len(tokenizer) == len(tokens) and tokenizer.name_or_path == str(path)


def test_a_vocabulary_gets_no_token_that_the_file_has_not(tmp_path):
    """transformers adds <|endoftext|>, of which the model would have no embedding."""
    path = write_vocabulary(tmp_path / "a.gguf", [*LETTERS, "th", "<s>"], merges=["t h"], bos=257)
    tokenizer = load_tokenizer(path)
    text = "the <|endoftext|> of <s>"
    ids = tokenizer(text)["input_ids"]
    assert max(ids) < len(tokenizer) == 258 and tokenizer.decode(ids) == text


def test_the_vocabulary_of_a_real_model_in_a_file_gives_the_token_ids_of_its_own_files(
    real_tokenizer, tmp_path
):
    described = json.loads(real_tokenizer.backend_tokenizer.to_str())
    tokens = real_tokenizer.convert_ids_to_tokens(range(len(real_tokenizer)))
    control = {each["content"] for each in described["added_tokens"] if each["special"]}
    types = [3 if token in control else 1 for token in tokens]
    merges = [" ".join(pair) for pair in described["model"]["merges"]]

    def in_a_file(split):
        return load_tokenizer(write_vocabulary(tmp_path / "smol.gguf", tokens, types, merges, split, eos=2))

    ours, texts = in_a_file("gpt-2"), [*SCRIPTS.values(), *CODE, *RUNS]
    assert len(texts) > 50 + len(RUNS)
    for text in texts:
        ids = ours(text)["input_ids"]
        assert ids == real_tokenizer(text)["input_ids"], text
        assert ours.decode(ids) == text
    apart = [id for part in ("x =  ", "1", "2", " is") for id in real_tokenizer(part)["input_ids"]]
    assert in_a_file("smollm")("x =  12 is")["input_ids"] == apart != ours("x =  12 is")["input_ids"]


def test_tokens_that_mark_a_gap_are_those_that_the_file_names(tmp_path):
    marks = ["<before>", "<behind>", "<between>", "<file>"]
    names = dict(zip(("fim_pre", "fim_suf", "fim_mid", "fim_sep"), range(256, 260), strict=True))
    tokens, types = [*LETTERS, *marks, "th"], [1] * 256 + [3] * 4 + [1]
    path = write_vocabulary(tmp_path / "a.gguf", tokens, types, ["t h"], **names)
    tokenizer = load_tokenizer(path)
    tokenizer.save_pretrained(tmp_path / "saved")
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "saved")):
        found = infill_tokens(each, len(each))
        assert (found.prefix, found.suffix, found.middle, found.file) == (256, 257, 258, 259)
        assert found.ends == {256, 257, 258, 259} and found.names == {*marks} and found.repository is None
    for change in ({"fim_mid": 999}, {"fim_mid": None}):  # one that is no token, or none
        told = {name: token for name, token in {**names, **change}.items() if token is not None}
        path = write_vocabulary(tmp_path / "b.gguf", tokens, types, ["t h"], **told)
        assert infill_tokens(load_tokenizer(path), len(tokens)) is None


def test_a_file_without_a_tokenizer_says_how_to_name_one(tmp_path):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(
        write_model(path).read_bytes().replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokans")
    )
    with pytest.raises(ValueError, match=r"tiny.gguf has no tokenizer; give one: --tokenizer DIRECTORY"):
        load_tokenizer(path)


# ------------------------------------------------------------------ what ends an answer

DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
HARMONY = ["<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>"]
VOCABULARIES = {
    # the marks of a vocabulary, those that its file names, and all that end an answer
    "ChatML": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], {"eos": 0}, {"<|endoftext|>", "<|im_end|>"}),
    "Llama 2": (["<s>", "</s>"], {"eos": 1}, {"</s>"}),
    "Llama 3": (
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|eot_id|>", "<|eom_id|>"],
        {"eos": 1},
        {"<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"},
    ),
    "Gemma 3": (
        ["<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"],
        {"eos": 0},
        {"<eos>", "<end_of_turn>"},
    ),
    "Gemma 4": (
        ["<eos>", "<bos>", "<|turn>", "<turn|>", "<|tool_call>", "<|tool_response>", "</s>"],
        {"eos": 0},
        {"<eos>", "<turn|>", "<|tool_response>"},
    ),
    "Phi-3": (
        ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"],
        {"eos": 0},
        {"<|endoftext|>", "<|end|>"},
    ),
    "gpt-oss": (["<|endoftext|>", *HARMONY], {"eos": 1}, {"<|endoftext|>", "<|return|>", "<|call|>"}),
    "gpt-oss, as Ollama has it": (
        ["<|endoftext|>", *HARMONY],
        {"eos": 0, "ends": [0, 1, 7]},
        {"<|endoftext|>", "<|return|>", "<|call|>"},
    ),
    "gpt-oss, with a wrong end of turn": (
        ["<|endoftext|>", *HARMONY],
        {"eos": 0, "eot": 5},
        {"<|endoftext|>", "<|return|>", "<|call|>"},
    ),
    "Solar Open": (
        ["<|endoftext|>", "<|begin|>", "<|end|>", "<|calls|>", "<|flush|>"],
        {"eos": 0},
        {"<|endoftext|>", "<|calls|>", "<|flush|>"},
    ),
    "DeepSeek": ([DEEPSEEK_END, "<\uff5cUser\uff5c>"], {"eos": 0}, {DEEPSEEK_END}),
    "Granite": (["<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"], {"eos": 0}, {"<|end_of_text|>"}),
    "GLM 4": (
        ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|observation|>"],
        {"eos": 0, "eot": 1, "eom": 3},
        {"<|endoftext|>", "<|user|>", "<|observation|>"},
    ),
    "Command R": (
        ["<EOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"],
        {"eos": 0},
        {"<EOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"},
    ),
    "EXAONE": (["[BOS]", "[|assistant|]", "[|endofturn|]"], {"eos": 2}, {"[|endofturn|]"}),
    "Kimi": (["[BOS]", "[EOS]", "<|im_end|>"], {"eos": 1}, {"[EOS]", "<|im_end|>"}),
    "several that the file lists": (["<a>", "<b>", "<c>"], {"eos": 0, "ends": [1]}, {"<a>", "<b>"}),
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_an_answer_ends_where_the_turn_of_its_template_does(tmp_path, name):
    marks, named, ends = VOCABULARIES[name]
    ids = {key: value if key == "ends" else 256 + value for key, value in named.items()}
    if "ends" in ids:
        ids["ends"] = [256 + token for token in ids["ends"]]
    path = write_vocabulary(
        tmp_path / "a.gguf", [*LETTERS, *marks, "th"], [1] * 256 + [3] * len(marks) + [1], ["t h"], **ids
    )
    tokenizer = load_tokenizer(path)
    assert set(tokenizer.convert_ids_to_tokens(end_tokens(GGUFFile.open(path)))) == ends
    for mark in marks:  # each is one token, which is no text
        assert tokenizer(f"a{mark}b", add_special_tokens=False)["input_ids"] == [
            *tokenizer("a", add_special_tokens=False)["input_ids"],
            256 + marks.index(mark),
            *tokenizer("b", add_special_tokens=False)["input_ids"],
        ]
        assert tokenizer.decode([256 + marks.index(mark)]) == mark
        assert tokenizer.decode([256 + marks.index(mark)], skip_special_tokens=True) == ""


TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|><|sep|>\n{% endfor %}"


@pytest.mark.parametrize("type_in_file", [1, 4, 5])
def test_marks_of_turns_are_control_tokens_whatever_the_file_says(tmp_path, type_in_file):
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|sep|>"]
    types = [1] * 256 + [3, *[type_in_file] * 3, 1]
    path = write_vocabulary(
        tmp_path / "a.gguf",
        [*LETTERS, *marks, "th"],
        types,
        ["t h"],
        eos=256,
        templates={"default": TEMPLATE},
    )
    tokenizer = load_tokenizer(path)
    assert end_tokens(GGUFFile.open(path)) == [256, 258]
    written = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], return_dict=False)
    assert [token for token in written if token >= 256] == [257, 258, 259]
    assert tokenizer.decode(written, skip_special_tokens=True) == "user\nhi\n"


def test_tags_that_a_template_writes_stay_text_where_the_file_says_so(tmp_path):
    """Qwen's, and Gemma's of HTML: an end of strikethrough ends no answer."""
    tags = ["<think>", "</think>", "<tool_call>", "</s>", "<|unwritten|>"]
    template = "<think></think><tool_call></s>{{ messages[0].content }}"
    types = [1] * 256 + [4, 4, 4, 4, 4, 1]
    tokens = [*LETTERS, *tags, "th"]
    path = write_vocabulary(tmp_path / "a.gguf", tokens, types, ["t h"], templates={"default": template})
    tokenizer = load_tokenizer(path)
    assert end_tokens(GGUFFile.open(path)) == []
    for token, tag in enumerate(tags, 256):
        assert tokenizer(tag)["input_ids"] == [token]
        assert tokenizer.decode([token], skip_special_tokens=True) == tag


def test_a_file_with_several_templates_has_them_by_name(tmp_path):
    def with_templates(templates):
        path = tmp_path / f"{len(templates)}.gguf"
        return load_tokenizer(write_vocabulary(path, [*LETTERS, "th"], merges=["t h"], templates=templates))

    templates = {
        "default": "<think>{{ messages[0].content }}",
        "tool_use": "{{ tools | tojson }}{{ messages[0].content }}",
    }
    tokenizer = with_templates(templates)
    assert tokenizer.chat_template == templates
    asked = [{"role": "user", "content": "why?"}]
    assert tokenizer.apply_chat_template(asked, tokenize=False) == "<think>why?"
    assert tokenizer.apply_chat_template(asked, tools=[{"a": 1}], tokenize=False) == '[{"a": 1}]why?'
    ids = tokenizer("<think>so</think>yes")["input_ids"]
    assert split_reasoning(tokenizer, [], ids) == ("so", "yes")
    assert with_templates({"default": "x"}).chat_template == "x"
    assert with_templates({}).chat_template is None
    assert with_templates({"rag": "r"}).chat_template is None
    assert with_templates({"rag": "r", "tool_use": "t"}).apply_chat_template(asked, tokenize=False) == "t"


# ------------------------------------------------------------------ SentencePiece


def pieces_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """``text`` as SentencePiece cuts it: of all pairs beside each other that make a token, the one with the
    best score is joined first, the leftmost of equals."""
    pieces = list(text)
    left = list(range(-1, len(pieces) - 1))
    right = [*range(1, len(pieces)), -1]
    pairs: list[tuple[float, int, int, str]] = []

    def add(at: int, next_at: int) -> None:
        if at >= 0 and next_at >= 0 and pieces[at] + pieces[next_at] in scores:
            joined = pieces[at] + pieces[next_at]
            heapq.heappush(pairs, (-scores[joined], at, next_at, joined))

    for at in range(len(pieces) - 1):
        add(at, at + 1)
    while pairs:
        _, at, next_at, joined = heapq.heappop(pairs)
        if not pieces[at] or not pieces[next_at] or pieces[at] + pieces[next_at] != joined:
            continue
        pieces[at] = joined
        pieces[next_at] = ""
        right[at] = right[next_at]
        if right[at] >= 0:
            left[right[at]] = at
        add(left[at], at)
        add(at, right[at])
    return [piece for piece in pieces if piece]


def of_characters(
    path: Path, architecture: str, space: str = " "
) -> tuple[Path, dict[str, float], list[str]]:
    """A vocabulary in the form of Gemma's, the scores of its plain tokens, and those that are searched for
    first: runs of spaces, as spaces, and of line ends."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    apart = [space * count for count in range(2, 32)] + ["\n" * count for count in range(1, 32)] + ["<b>"]
    raw_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    generator = random.Random(0)
    letters = "abcde-=\u2581"
    plain = ["--", "---", "----", "a" * 2, "a" * 3, "a" * 5, "=" * 8, "==", "====", "=" * 16, "\u2581a"]
    plain += ["".join(generator.choices(letters, k=generator.randint(2, 4))) for _ in range(300)]
    plain = [text for text in dict.fromkeys([*plain, *letters]) if not text.startswith("\u2581" * 2)]
    tokens = [*special, *apart, *raw_bytes, *plain]
    types = [3] * 4 + [4] * len(apart) + [6] * 256 + [1] * len(plain)
    scores = {text: -float(rank) for rank, text in enumerate(plain)}
    all_scores = [*[-1000.0] * (len(special) + len(apart)), *[0.0] * 256, *scores.values()]
    ids = {"eos": 1, "bos": 2, "unknown": 3, "padding": 0}
    written = write_vocabulary(path, tokens, types, scores=all_scores, architecture=architecture, **ids)
    return written, scores, apart


def test_runs_of_spaces_that_a_file_spells_with_bars_are_the_same_tokens(tmp_path):
    spelt = (of_characters(tmp_path / f"{space}.gguf", "gemma3", space)[0] for space in (" ", "\u2581"))
    spaced, barred = map(load_tokenizer, spelt)
    for count in range(70):
        text = f"a{' ' * count}b"
        assert barred(text)["input_ids"] == spaced(text)["input_ids"]
        assert barred.decode(barred(text)["input_ids"], skip_special_tokens=True) == text


def test_a_vocabulary_with_scores_gives_the_tokens_that_sentencepiece_does(tmp_path):
    path, scores, apart = of_characters(tmp_path / "a.gguf", "gemma3")
    tokenizer = load_tokenizer(path)
    longest_first = sorted(apart, key=len, reverse=True)
    cut = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def expected(text: str) -> list[str]:
        parts = filter(None, cut.split(text))
        pieces = [
            [part] if part in apart else pieces_by_score(part.replace(" ", "\u2581"), scores)
            for part in parts
        ]
        return [piece for part in pieces for piece in part]

    generator = random.Random(1)
    mixed = ["".join(generator.choices("abcde-= \n", k=40)) for _ in range(300)]
    mixed += ["".join(generator.choices("abc-= ", k=3)) * 12 for _ in range(300)]
    indents = [f"a{' ' * count}b" for count in range(1, 120)]
    runs = [text for text in RUNS if text[0] in "a-= \n"]
    for text in ("a<b>b", *mixed, *indents, *runs):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.convert_ids_to_tokens(ids) == expected(text), text
        assert tokenizer.decode(ids) == text
    assert tokenizer("a")["input_ids"][0] == 2  # <bos>
    assert tokenizer.decode(tokenizer("\u4e2d", add_special_tokens=False)["input_ids"]) == "\u4e2d"
    spaces = tokenizer(" " * 33, add_special_tokens=False)["input_ids"]
    assert [len(token) for token in tokenizer.convert_ids_to_tokens(spaces)] == [31, 2]


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "phi3"])
def test_a_space_before_the_text_is_put_where_transformers_puts_it(tmp_path, architecture):
    path, _, _ = of_characters(tmp_path / "tiny.gguf", architecture)
    ours, theirs = load_tokenizer(path), AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    for text in ("abc de", " a", "a", "<bos>a b", "a\nb"):
        ids = ours(text)["input_ids"]
        assert ids == theirs(text)["input_ids"], text
        assert ours.decode(ids) == theirs.decode(ids)


def test_a_vocabulary_of_another_kind_or_with_a_merge_of_no_token_is_refused(tmp_path):
    raw = write_vocabulary(tmp_path / "a.gguf", [*LETTERS, "th"], merges=["t h"]).read_bytes()
    (tmp_path / "b.gguf").write_bytes(raw.replace(b"gpt2", b"bert"))
    with pytest.raises(
        ValueError, match=r"b.gguf cannot be read .*kind 'bert', and gpt2, llama and gemma4 .*--tok"
    ):
        load_tokenizer(tmp_path / "b.gguf")
    (tmp_path / "c.gguf").write_bytes(raw.replace(b"t h", b"t z"))
    with pytest.raises(ValueError, match=r"c.gguf cannot be read .*merge 't z' is of a token that"):
        load_tokenizer(tmp_path / "c.gguf")
    (tmp_path / "d.gguf").write_bytes(raw.replace(b"ggml.token_type", b"ggml.token_tipe"))
    assert load_tokenizer(tmp_path / "d.gguf")("the")["input_ids"] == [256, ord("e")]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_change_of_a_vocabulary_ends_in_anything_but_an_error_that_names_the_file(tmp_path, data):
    whole = tmp_path / "whole.gguf"
    if not whole.exists():
        marks = ["<|im_end|>", "<b>"]
        templates = {"default": "<|im_end|>"}
        tokens, types = [*LETTERS, *marks, "th"], [1] * 256 + [3, 4, 1]
        write_vocabulary(whole, tokens, types, ["t h"], "qwen2", ends=[256], eos=256, templates=templates)
    raw = bytearray(whole.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(24, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "fuzzed.gguf"
    path.write_bytes(raw)
    try:
        end_tokens(GGUFFile.open(path))
        load_tokenizer(path)
    except ValueError as error:
        assert "fuzzed.gguf" in str(error)
