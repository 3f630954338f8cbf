import io
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from conftest import FACTORS, GROUPED
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tiny_chat import VOCAB_SIZE, chat_model, chat_tokenizer, save_chat_model, wide_tree
from transformers import Phi3Config, Phi3ForCausalLM

from medusa import CandidateTree, MedusaModel
from medusa.cli.chat import ChatSession, ChatTerminal, ContextFullError, _cost_line
from medusa.cli.main import main
from medusa.cli.option_types import ChatOptions, ReplyOptions
from medusa.cli.options import AnswerOptions
from medusa.cli.terminal import WrappedText, controls_not_echoed, stop_button
from medusa.decoding.adaptive import DraftCost, DraftCosts
from medusa.decoding.batch import StepResult
from medusa.decoding.statistics import DecodingStatistics
from medusa.learning.learned_heads import LearnedVersion
from medusa.prompts import Prompt

TOKENIZER = chat_tokenizer()
END = TOKENIZER.eos_token_id


class ScriptedModel:
    """Says what it is told to, a step at a time, in place of a MedusaModel."""

    def __init__(self, *answers, max_context=512):
        model = chat_model(context=max_context)
        self.base, self.tokenizer, self.tree, self.device = model.base, TOKENIZER, wide_tree(), model.device
        self.heads = SimpleNamespace(num_heads=2)
        self.drafter_for, self.step, self.is_compiled = model.drafter_for, "general", False
        self.plain_step_seconds = self.learning = None
        self.answers = list(answers)
        self.calls = []

    def stream(self, *, input_ids, max_new_tokens, statistics, **arguments):
        self.calls.append(
            {"text": TOKENIZER.decode(input_ids[0]), "max_new_tokens": max_new_tokens, **arguments}
        )
        return self._steps(self.answers.pop(0), max_new_tokens, statistics)

    def _steps(self, answer, max_new_tokens, statistics):
        tokens = [*TOKENIZER(answer, add_special_tokens=False).input_ids, END][:max_new_tokens]
        statistics.num_rows += 1
        yield StepResult([tokens[:1]], [[0]])
        for start in range(1, len(tokens), 2):
            new = tokens[start : start + 2]
            statistics.record_step([len(new) - 1], 3)
            yield StepResult([new], [[1, 0][-len(new) :]])


def asking(system=None, plain=False, max_new_tokens=512, **answers):
    return ChatOptions(
        answers=AnswerOptions(max_new_tokens, **answers), replies=ReplyOptions(system=system, plain=plain)
    )


def scripted(*answers, color_depth=False, max_context=512, **asked):
    """A terminal over a scripted model, and what it has printed so far as a function."""
    model = ScriptedModel(*answers, max_context=max_context)
    session = ChatSession(model, None, asking(**asked))
    screen = io.StringIO()
    console = Console(
        file=screen,
        width=200,
        highlight=False,
        force_terminal=color_depth,
        color_system="standard" if color_depth else None,
    )
    return ChatTerminal(session, console, color_depth), screen.getvalue


def test_history_holds_questions_and_answers_and_is_rendered_with_the_template():
    terminal, _ = scripted("Hello!", "Fine.", system="Be kind.")
    terminal.converse(iter(["Hi", "How are you?"]))
    roles = [message["role"] for message in terminal.session.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert terminal.session.model.calls[1]["text"] == (
        "<|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>Hello!<|end|>"
        "<|user|>How are you?<|end|><|assistant|>"
    )


def test_each_answer_is_followed_by_what_it_cost():
    terminal, printed = scripted("Hello")
    terminal.ask("Hi")
    # 6 tokens with the end token: one of the prefill, then 3 steps of which 2 accept a guess.
    assert "Hello\n6 tokens in " in printed()
    assert "1.67 tokens per step" in printed()
    assert "paused" not in printed()


def test_the_cost_of_an_answer_says_in_how_many_steps_drafting_paused():
    statistics = DecodingStatistics(num_rows=1, num_steps=8, num_paused=5)
    line = _cost_line(statistics, 1.0)
    assert "1.00 tokens per step · drafting paused in 5 of 8 steps, where it does not pay" in line


def test_the_cost_of_an_answer_says_what_plain_decoding_gives_once_that_is_known():
    costs = DraftCosts()
    cost = costs.known["general", 1] = DraftCost()
    assert costs.plain_seconds(1) is None
    for seconds in (0.04, 0.05, 0.3):
        cost.learn(0.06, seconds)
    assert costs.plain_seconds(1) == 0.05 and costs.plain_seconds(2) is None
    statistics = DecodingStatistics(num_rows=1, num_steps=8)
    assert "plainly about 20.0 tokens/s" in _cost_line(statistics, 1.0, plain_seconds=costs.plain_seconds(1))
    assert "plainly" not in _cost_line(statistics, 1.0)


def test_a_chat_says_when_it_drafts_with_other_heads_that_it_has_learned():
    terminal, printed = scripted("One.", "Two.", "Three.")
    version = LearnedVersion(2, "2026-01-01T00:00:00", ["use"], True, 9_000, 3.0, 1.62, None)
    learning = SimpleNamespace(
        version=None, follows=False, state="collecting", report=lambda: {"new_bytes": 4_200}
    )
    terminal.session.model.learning = learning
    terminal.ask("Hi")
    learning.version = version
    terminal.ask("Hi")
    assert "drafts with heads" not in printed(), "heads that were named stay"
    learning.follows = True
    terminal.ask("Hi")
    line = "drafts with heads that it has learned, version 2: 1.62 tokens a step"
    assert printed().index("Two.") < printed().index(line) < printed().index("Three.")
    terminal.obey("/stats")
    assert "learning by use: collecting, 4 kB of text that is new" in printed()
    assert printed().count(line) == 1


def test_reset_forgets_the_conversation_and_keeps_the_system_message():
    terminal, printed = scripted("Hello!", "Again.", system="Be kind.")
    terminal.converse(iter(["Hi", "/reset", "Hi"]))
    assert (
        terminal.session.model.calls[1]["text"] == "<|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>"
    )
    assert "starts afresh" in printed()


def test_stats_cover_the_session_across_resets():
    terminal, printed = scripted("Hello!", "Again.")
    terminal.converse(iter(["/stats", "Hi", "/reset", "Hi", "/stats"]))
    assert "No answers yet." in printed()
    assert "2 answers · 14 tokens" in printed()
    assert "accepted once reached" in printed()


def test_exit_ends_the_conversation_and_unknown_commands_list_the_known_ones():
    terminal, printed = scripted("A path.", "A slash.", "never said")
    terminal.converse(
        iter(["/foo", "/foo bar", "", "  ", "/etc/passwd is what?", " /foo what?", "/exit", "more"])
    )
    assert "There is no command /foo." in printed()
    assert "There is no command /foo bar. A space before it asks the model." in printed()
    assert "/stats" in printed()
    asked = [call["text"] for call in terminal.session.model.calls]
    assert len(asked) == 2, "a slash alone does not make a command, nor does one after a space"
    assert "<|user|>/foo what?<|end|>" in asked[1]


def test_stats_say_which_depths_the_heads_guess():
    terminal, printed = scripted("Hello!")
    terminal.converse(iter(["Hi", "/stats"]))
    assert "Heads guess depths 1 to 2; other drafters guess the deeper ones." in printed()
    assert "1 answer · " in printed()


def wrapped(pieces, width=12, is_terminal=True):
    screen = io.StringIO()
    text = WrappedText(Console(file=screen, width=width, highlight=False, force_terminal=is_terminal))
    for piece in pieces:
        text.write(piece)
    text.finish()
    return screen.getvalue()


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["one two thr", "ee four"], "one two \nthree four\n"),
        (["exactly", " 12345 x"], "exactly \n12345 x\n"),
        (["a", "\n", "\tb c"], "a\n        b c\n"),
        (["unbreakably", "long", "word"], "unbreakablyl\nongword\n"),
        (["一二三四五六七八"], "一二三四五六\n七八\n"),
        ([], "\n"),
    ],
)
def test_lines_break_between_words_on_a_terminal(pieces, expected):
    assert wrapped(pieces) == expected


def test_a_pipe_gets_the_text_as_it_is():
    assert wrapped(["one two thr", "ee four five"], is_terminal=False) == "one two three four five\n"


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet="ab 一\n", max_size=60), st.integers(0, 60))
def test_wrapping_changes_nothing_but_spaces_and_line_breaks(text, cut):
    shown = wrapped([text[:cut], text[cut:]])
    assert "".join(shown.split()) == "".join(text.split())
    assert max(len(line) + line.count("一") for line in shown.split("\n")) <= 12


def test_words_of_an_answer_stay_whole_on_a_terminal():
    terminal, printed = scripted("Several words that do not fit one line", color_depth=True)
    terminal.color_depth, terminal.console.width = False, 20
    terminal.ask("Hi")
    assert "Several words that \ndo not fit one line\n" in printed()


def read_terminal(terminal, mark):
    """What a program writes to its terminal, up to ``mark``."""
    shown, end = b"", time.monotonic() + 20
    while mark not in shown and time.monotonic() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            shown += os.read(terminal, 4096)
    assert mark in shown, shown
    return shown.decode()


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_pasted_text_of_four_lines_is_one_question():
    import pty

    script = """
from rich.console import Console
from medusa.cli.terminal import typed_questions
for question in typed_questions(Console()):
    print(repr(question), flush=True)
"""
    terminal, theirs = pty.openpty()
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = subprocess.Popen([sys.executable, "-c", script], **streams, start_new_session=True)
    read_terminal(terminal, b"> ")
    os.write(terminal, b"\x1b[200~one\ntwo\nthree\nfour\x1b[201~\n")
    assert "'one\\ntwo\\nthree\\nfour'" in read_terminal(terminal, b"'\r\n")
    for _ in range(20):  # a Ctrl-D between two questions is lost: the terminal changes its mode there
        os.write(terminal, b"\x04")
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
            break
    assert process.returncode == 0
    os.close(terminal)
    os.close(theirs)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_ctrl_c_is_not_written_into_an_answer(monkeypatch):
    import pty
    import termios

    ours, theirs = pty.openpty()
    with open(theirs, closefd=True) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with controls_not_echoed():
            assert not termios.tcgetattr(stdin)[3] & termios.ECHOCTL
        assert termios.tcgetattr(stdin)[3] & termios.ECHOCTL
    os.close(ours)


def test_each_row_of_a_prompts_file_is_a_conversation_of_its_own_with_its_own_messages():
    terminal, printed = scripted("A.", "B.", "C.")
    system, user = {"role": "system", "content": "Sing."}, {"role": "user", "content": "three"}
    one = Prompt(({"role": "user", "content": "one"},), later_turns=("two",))
    terminal.answer_prompts([one, Prompt((system, user))])
    assert [call["text"] for call in terminal.session.model.calls] == [
        "<|user|>one<|end|><|assistant|>",
        "<|user|>one<|end|><|assistant|>A.<|end|><|user|>two<|end|><|assistant|>",
        "<|system|>Sing.<|end|><|user|>three<|end|><|assistant|>",
    ]
    assert "> two\nB.\n" in printed()


def test_the_first_ctrl_c_ends_the_answer_after_its_step_and_keeps_what_was_said():
    terminal, printed = scripted("One two three", "Go on.")
    steps = terminal.session.model._steps

    def pressed_in_the_third_step(*arguments):
        for number, step in enumerate(steps(*arguments)):
            if number == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield step

    terminal.session.model._steps = pressed_in_the_third_step
    before = signal.getsignal(signal.SIGINT)
    terminal.ask("Count")
    assert terminal.session.messages[-1] == {"role": "assistant", "content": "One "}
    assert terminal.session.answers[-1].ended_by == "interrupt"
    assert "the text so far stays in the conversation" in printed()
    assert signal.getsignal(signal.SIGINT) is before
    terminal.session.model._steps = steps
    terminal.ask("And?")
    assert "<|assistant|>One <|end|><|user|>And?" in terminal.session.model.calls[1]["text"]


def test_ctrl_c_twice_before_the_first_word_forgets_the_question():
    terminal, printed = scripted("never said")

    def stuck(*arguments):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        yield

    terminal.session.model._steps = stuck
    terminal.ask("Anyone?")
    assert terminal.session.messages == []
    assert "the question is forgotten" in printed()


def test_the_stop_button_raises_only_on_the_second_press():
    with stop_button() as stopped:
        signal.raise_signal(signal.SIGINT)
        assert stopped.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_conversation_beyond_the_context_is_refused_and_the_history_stays_as_it_was():
    terminal, printed = scripted("Hello!", "Short.", max_context=40)
    terminal.ask("Hi")
    history = list(terminal.session.messages)
    with pytest.raises(ContextFullError, match=r"takes \d+ tokens with this question.*context is 40"):
        list(terminal.session.reply("x" * 40))
    terminal.ask("x" * 40)
    assert terminal.session.messages == history
    assert "(/reset)" in printed()
    terminal.ask("ok")
    assert terminal.session.messages[-1]["content"] == "Short."


def test_answers_say_why_they_were_cut():
    terminal, printed = scripted(
        "A long answer", "Another long answer", "End", max_new_tokens=4, max_context=50
    )
    terminal.ask("Hi")
    assert terminal.session.answers[-1].ended_by == "max_new_tokens"
    assert "cut at --max-new-tokens" in printed()
    terminal.session.reset()
    terminal.ask("x" * 44)
    assert terminal.session.answers[-1].ended_by == "context"
    assert "context is full" in printed()
    terminal.session.reset()
    terminal.ask("Hi")
    assert terminal.session.answers[-1].ended_by == "end", "the end token is the fourth"


def test_tokens_are_coloured_by_the_depth_that_guessed_them():
    terminal, printed = scripted("abc", color_depth=True)
    deepest = terminal.session.max_depth
    assert f"depth {deepest}" in printed() and f"depth {deepest + 1}" not in printed()
    terminal.ask("Hi")
    green = "\x1b[32m"
    assert f"{green}b\x1b[0m" in printed()
    assert f"{green}a" not in printed()
    assert f"{green}c" not in printed()


def test_escape_sequences_in_an_answer_are_shown_and_not_obeyed():
    terminal, printed = scripted("\x1b[31mred\x07\n\tnext")
    terminal.ask("Hi")
    assert "\u241b[31mred\u2407\n        next" in printed()


def test_markup_in_an_answer_is_plain_text():
    terminal, printed = scripted("[bold]not bold[/bold] :smile:")
    terminal.ask("Hi")
    assert "[bold]not bold[/bold] :smile:" in printed()


def test_the_answer_is_the_models_own_and_the_same_with_heads_and_without():
    texts = []
    for is_plain in (False, True):
        for temperature in (0, 0.8):
            options = asking(plain=is_plain, max_new_tokens=30, seed=5, temperature=temperature)
            session = ChatSession(chat_model(), None, options)
            texts.append(["".join(said for said, _ in session.reply(text)) for text in ("Hello", "More")])
            assert session.messages[1]["content"] == texts[-1][0]
            assert bool(session.statistics.acceptance_rate) is not is_plain
    assert texts[:2] == texts[2:]
    model = chat_model()
    prompt = TOKENIZER("<|user|>Hello<|end|><|assistant|>", return_tensors="pt").input_ids
    tokens = model.base.generate(prompt, max_new_tokens=30, do_sample=False)[0, prompt.shape[1] :]
    assert texts[0][0] == TOKENIZER.decode(tokens, skip_special_tokens=True)


def test_repeated_answers_of_a_session_draw_other_samples():
    session = ChatSession(chat_model(), None, asking(max_new_tokens=20, seed=5, temperature=1.5))
    first = list(session.reply("Hello"))
    session.reset()
    assert list(session.reply("Hello")) != first


def test_statistics_of_a_stopped_answer_still_count():
    session = ChatSession(chat_model(), None, asking(max_new_tokens=50))
    reply = session.reply("Hello")
    while not next(reply)[0]:
        pass
    reply.close()
    assert session.answers[0].ended_by == "interrupt"
    assert isinstance(session.statistics, DecodingStatistics)
    assert session.statistics.num_tokens >= 1


def test_a_model_without_a_chat_template_is_refused_with_the_way_out():
    model = chat_model()
    model.tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"no chat template.*medusa generate --base"):
        ChatSession(model, None, ChatOptions())


def test_the_interrupted_model_is_as_good_as_new():
    model = chat_model()
    session = ChatSession(model, None, asking(max_new_tokens=40))
    whole = "".join(text for text, _ in session.reply("Hello"))
    session.reset()
    stopped = session.reply("Hello")
    next(stopped)
    stopped.close()
    session.reset()
    assert "".join(text for text, _ in session.reply("Hello")) == whole
    assert not torch.is_inference_mode_enabled()


def test_an_answer_ends_before_a_stop_text_and_decoding_stops_there():
    model = ScriptedModel("One. Two. Three. Four.")
    options = ChatOptions(replies=ReplyOptions(stop=(". Three",)))
    session = ChatSession(model, None, options)
    assert "".join(text for text, _ in session.reply("Count")) == "One. Two"
    assert session.answers[0].ended_by == "end"
    assert session.messages[-1]["content"] == "One. Two"
    whole = ChatSession(ScriptedModel("One. Two. Three. Four."), None, ChatOptions())
    list(whole.reply("Count"))
    assert session.statistics.num_tokens < whole.statistics.num_tokens


def test_generate_ends_before_a_stop_text(tmp_path, capsys):
    base, heads = save_chat_model(tmp_path)
    words = ["generate", "--base", base, "--heads", heads, "--max-new-tokens", "12", "Hello"]
    assert main(words) == 0
    whole = capsys.readouterr().out.rstrip("\n")
    assert main([*words, "--stop", whole[3:5]]) == 0
    assert capsys.readouterr().out == whole[: whole.index(whole[3:5])] + "\n"


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"])
def test_at_the_length_where_longrope_changes_its_frequencies_the_text_is_read_anew(sampling):
    torch.manual_seed(2)
    config = Phi3Config(
        **{key: value for key, value in GROUPED.items() if key != "head_dim"} | {"vocab_size": VOCAB_SIZE},
        original_max_position_embeddings=30,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS},
    )
    base = Phi3ForCausalLM(config).eval()
    base.generation_config.eos_token_id = END
    session = ChatSession(MedusaModel(base, tokenizer=TOKENIZER), None, asking(max_new_tokens=50, **sampling))
    for _ in session.reply("why?"):
        pass
    asked = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": "why?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )["input_ids"]
    assert asked.shape[1] < 30 < asked.shape[1] + 50
    how = {"do_sample": bool(sampling), **sampling, "tree": CandidateTree.chain(0)}
    text = session.model.generate(asked, max_new_tokens=31 - asked.shape[1], **how)
    if END not in text[0, asked.shape[1] :]:
        num_left, mask = asked.shape[1] + 50 - text.shape[1], torch.ones_like(text)
        text = session.model.generate(text, attention_mask=mask, max_new_tokens=num_left, **how)
    expected = TOKENIZER.decode(text[0, asked.shape[1] :], skip_special_tokens=True)
    assert session.answers[-1].text == expected
    for _ in session.reply("and then?"):
        pass
    assert len(session.messages) == 4, "the conversation goes on past it"
