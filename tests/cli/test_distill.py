import json
import shutil
import threading
import time
from queue import SimpleQueue

import pytest
import torch
from conftest import CHECKOUT, needs_kernels
from fake_endpoint import fake_endpoints
from reported import ran
from tiny_chat import chat_base, chat_tokenizer, save_chat_model

from medusa import MedusaModel
from medusa.cli.main import main
from medusa.files import read_json
from medusa.prompts import read_prompts
from medusa.training import endpoints
from medusa.training.distillation.answering import (
    ChatEndpoint,
    Conversation,
    EndpointAnswerer,
    LocalAnswerer,
    Refusal,
    Reply,
    question_frame,
)
from medusa.training.distillation.distill import (
    AnswerFile,
    TimeLimit,
    configuration_path,
    distill,
    prompt_free,
    unanswered,
)

MAX_NEW_TOKENS = 12


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setattr(endpoints, "MAX_ATTEMPTS", 2)
    monkeypatch.setattr(endpoints, "FIRST_WAIT", 0.001)
    with fake_endpoints() as start:
        yield start


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def prompts_file(tmp_path, num_prompts=7):
    rows = [{"prompt": "word " * (1 + 3 * i % 5) + str(i), "category": "qa"} for i in range(num_prompts)]
    return write_rows(tmp_path / "prompts.jsonl", *rows)


def chat_model(base):
    return MedusaModel(base, tokenizer=chat_tokenizer())


def brief_base():
    """A base that often ends its turn."""
    base = chat_base()
    with torch.no_grad():
        base.lm_head.weight[256] *= 6
    return base


def answer_all(tmp_path, name, prompts, batch_size=3, temperatures=(0.0, 0.9), seed=5, **options):
    """Rows by index, as a run over ``prompts`` writes them."""
    answerer = LocalAnswerer(chat_model(chat_base()), batch_size, MAX_NEW_TOKENS, **options)
    path = tmp_path / name
    with AnswerFile(path, {}) as answers:
        waiting = unanswered(prompts, answers, temperatures, seed)
        distill(waiting, answerer, answers, TimeLimit(None))
    return {row["index"]: row for row in read_rows(path)}


def test_answers_are_the_same_for_every_batch_size_and_order(tmp_path):
    prompts = read_prompts(prompts_file(tmp_path))
    alone = answer_all(tmp_path, "alone.jsonl", prompts, batch_size=1)
    assert sorted(alone) == list(range(7))
    for batch_size in (2, 3, 16):
        assert answer_all(tmp_path, f"{batch_size}.jsonl", prompts, batch_size) == alone


def test_an_answer_is_what_the_model_generates_at_that_temperature_and_seed(tmp_path):
    prompts = read_prompts(prompts_file(tmp_path))
    model = MedusaModel(chat_base(), tokenizer=chat_tokenizer())
    for index, row in answer_all(tmp_path, "rows.jsonl", prompts).items():
        ids = model.tokenizer.apply_chat_template(
            list(prompts[index].messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        sampling = {"do_sample": True, "temperature": 0.9, "top_k": 0} if index % 2 else {"do_sample": False}
        out = model.generate(**ids, max_new_tokens=MAX_NEW_TOKENS, seed=5 + index, **sampling)
        new = out[0, ids["input_ids"].shape[1] :]
        expected = model.tokenizer.decode(new, skip_special_tokens=True)
        assert row["temperature"] == (0.9 if index % 2 else 0.0)
        assert row["messages"][-1]["content"].rstrip("\ufffd") == expected.rstrip("\ufffd")


def test_later_turns_are_asked_after_the_model_has_answered(tmp_path):
    turns = [f"question {letter}" for letter in "abcd"]
    file = write_rows(tmp_path / "p.jsonl", *({"turns": turns[i:]} for i in range(4)))
    answerer = LocalAnswerer(chat_model(brief_base()), 2, max_new_tokens=60)
    with AnswerFile(tmp_path / "rows.jsonl", {}) as answers:
        distill(unanswered(read_prompts(file), answers, [0.7], 3), answerer, answers, TimeLimit(None))
    rows = read_rows(tmp_path / "rows.jsonl")
    assert max(len(row["messages"]) for row in rows) > 2
    for row in rows:
        asked, given = row["messages"][::2], row["messages"][1::2]
        assert [message["content"] for message in asked] == turns[row["index"] :][: len(asked)]
        assert {message["role"] for message in given} == {"assistant"}


FINE = {"role": "assistant", "content": "fine"}


def test_a_conversation_takes_replies_in_turn_and_ends_at_a_cut_one():
    whole = Reply(FINE, was_cut=False, num_tokens=1)
    cut = Reply({**FINE, "content": "fi"}, was_cut=True, num_tokens=1)
    conversation = Conversation(0, [{"role": "user", "content": "a"}])
    conversation.later_turns.extend(["b", "c"])
    assert conversation.receive(whole)
    assert conversation.messages[-1] == {"role": "user", "content": "b"}
    assert not conversation.receive(cut)
    assert [m["content"] for m in conversation.messages] == ["a", "fine", "b", "fi"]
    assert conversation.was_cut


def test_a_turn_that_gets_no_answer_is_taken_back():
    conversation = Conversation(0, [{"role": "user", "content": "a"}])
    conversation.later_turns.append("b")
    conversation.receive(Reply(FINE, was_cut=False, num_tokens=1))
    assert not conversation.receive(Refusal("too long"))
    assert [m["content"] for m in conversation.messages] == ["a", "fine"]
    assert conversation.num_answers == 1


def test_answers_in_the_file_stay_part_of_the_question_but_are_not_written_as_ours(tmp_path):
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "x" * 600},  # does not fit the context of 512
    ]
    fits = [*history[:2], {"role": "user", "content": "bye"}]
    file = write_rows(tmp_path / "p.jsonl", {"messages": history}, {"messages": fits})
    rows = answer_all(tmp_path, "rows.jsonl", read_prompts(file))
    assert list(rows) == [1]
    assert rows[1]["messages"][:3] == fits


def test_the_model_asks_its_own_questions_when_there_are_no_prompts(tmp_path):
    prefix, stop = question_frame(chat_tokenizer())
    assert chat_tokenizer().decode(prefix) == "<|user|>"
    assert chat_tokenizer().decode([stop]) == "<|end|>"
    answerer = LocalAnswerer(chat_model(brief_base()), 4, max_new_tokens=40)
    with AnswerFile(tmp_path / "rows.jsonl", {}) as answers:
        waiting = unanswered(prompt_free(12), answers, [0.7], seed=0)
        report = distill(waiting, answerer, answers, TimeLimit(None))
    rows = read_rows(tmp_path / "rows.jsonl")
    assert report.num_ended == 12
    assert rows
    assert len({row["messages"][0]["content"] for row in rows}) > 1
    for row in rows:
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        assert row["messages"][0]["content"].strip()


def test_prompt_free_mode_needs_a_template_that_shows_the_question():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ValueError, match="marks its end"):
        question_frame(tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        question_frame(tokenizer)


def test_a_model_without_an_end_token_is_refused():
    base, tokenizer = chat_base(), chat_tokenizer()
    base.generation_config.eos_token_id = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="names no end-of-sequence token"):
        LocalAnswerer(MedusaModel(base, tokenizer=tokenizer), 1, 8)


def test_giving_up_when_the_first_prompts_are_all_refused(tmp_path):
    rows = [{"prompt": "x" * 600} for _ in range(5)]
    prompts = read_prompts(write_rows(tmp_path / "p.jsonl", *rows))
    with pytest.raises(ValueError, match=r"first 3 prompts were all refused: .*p\.jsonl row 1: prompt of"):
        answer_all(tmp_path, "rows.jsonl", prompts)


def test_the_time_limit_keeps_what_is_there_and_marks_it_as_cut(tmp_path):
    class Limit(TimeLimit):
        checks = 0

        def is_up(self):
            self.checks += 1
            return self.checks > 20

    prompts = read_prompts(prompts_file(tmp_path))
    answerer = LocalAnswerer(chat_model(chat_base()), 2, max_new_tokens=300)
    with AnswerFile(tmp_path / "rows.jsonl", {}) as answers:
        report = distill(unanswered(prompts, answers, [0.0], 0), answerer, answers, Limit(None))
    rows = read_rows(tmp_path / "rows.jsonl")
    assert 0 < len(rows) == report.num_written < 7
    assert report.num_unasked == 7 - len(rows)
    assert rows[-1]["finish_reason"] == "length"
    assert report.num_tokens <= 2 * 20


def test_a_run_goes_on_where_a_killed_one_stopped(tmp_path):
    prompts = read_prompts(prompts_file(tmp_path))
    whole = answer_all(tmp_path, "whole.jsonl", prompts)
    torn = tmp_path / "torn.jsonl"
    answer_all(tmp_path, "torn.jsonl", prompts[:4])
    with torn.open("a", encoding="utf-8") as file:
        file.write('{"index": 6, "messages": [{"role": "us')
    assert answer_all(tmp_path, "torn.jsonl", prompts) == whole
    assert len(read_rows(torn)) == 7


def test_rows_that_were_answered_are_not_asked_again(tmp_path):
    prompts = read_prompts(prompts_file(tmp_path))
    answer_all(tmp_path, "rows.jsonl", prompts[:5])
    with AnswerFile(tmp_path / "rows.jsonl", {}) as answers:
        assert [c.index for c in unanswered(prompts, answers, [0.0], 0)] == [5, 6]


def test_an_output_that_answers_other_prompts_is_refused(tmp_path):
    prompts = read_prompts(prompts_file(tmp_path))
    answer_all(tmp_path, "rows.jsonl", prompts)
    with pytest.raises(ValueError, match=r"answers other prompts: its row for index \d"):
        answer_all(tmp_path, "rows.jsonl", prompts[1:])


def test_the_program_answers_from_an_endpoint_and_goes_on_after_a_stop(serve, tmp_path, capsys):
    fake = serve()
    file = write_rows(
        tmp_path / "p.jsonl", {"turns": ["a", "b"], "category": "x"}, {"prompt": "REFUSE"}, {"prompt": "c"}
    )
    output = tmp_path / "out" / "rows.jsonl"
    command = ["--prompts", str(file), "--output", str(output), "--endpoint", fake.url, "--model", "tiny"]
    assert main(["distill", *command, "--limit", "1"]) == 0
    assert len(fake.requests) == 2
    assert main(["distill", *command]) == 0
    rows = {row["index"]: row for row in read_rows(output)}
    assert sorted(rows) == [0, 2]
    assert [m["content"] for m in rows[0]["messages"]] == ["a", "you said a", "b", "you said b"]
    assert rows[0] | {"messages": None} == {
        "index": 0, "category": "x", "messages": None, "temperature": 0.0, "finish_reason": "stop"
    }  # fmt: skip
    said = capsys.readouterr().err
    assert "1 answered before" in said
    assert "1 could not be answered" in said


def test_the_program_answers_with_a_model_from_disk(tmp_path, capsys):
    base, _ = save_chat_model(tmp_path)
    output = tmp_path / "rows.jsonl"
    command = ["--base", base, "--prompts", str(prompts_file(tmp_path)), "--output", str(output)]
    command += ["--max-new-tokens", "8", "--device", "cpu", "--batch-size", "3"]
    assert main(["distill", *command]) == 0
    rows = read_rows(output)
    assert sorted(row["index"] for row in rows) == list(range(7))
    assert {row["finish_reason"] for row in rows} <= {"stop", "length"}
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["num_answers"] == 7 and found["num_tokens"] > 0 and found["seconds"] > 0
    assert main(["distill", *command]) == 0
    assert read_rows(output) == rows
    out, said = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["num_answers"] == 0
    assert "medusa 0." in said
    assert "7 prompts, 7 answered before" in said
    assert f"medusa train --config smollm2_demo --base {base} --data {output} --output_dir " in said


@needs_kernels
def test_answers_of_the_int8_engine_are_kept_apart_from_the_models_own(tmp_path, capsys):
    base, _ = save_chat_model(tmp_path)
    output = tmp_path / "rows.jsonl"
    command = ["--base", base, "--prompts", str(prompts_file(tmp_path)), "--output", str(output)]
    command += ["--max-new-tokens", "8", "--device", "cpu"]
    assert main(["distill", *command, "--engine", "int8"]) == 0
    assert len(read_rows(output)) == 7
    assert read_json(configuration_path(output))["engine"] == "int8"
    assert main(["distill", *command, "--engine", "eager"]) == 1
    assert (
        "was made with another configuration: engine was 'int8' and is None"
        in capsys.readouterr().err.replace("\n", " ")
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="nothing to compile with")
def test_compiled_steps_give_the_same_answers(tmp_path):
    base, _ = save_chat_model(tmp_path)
    prompts = str(prompts_file(tmp_path))
    for step in ("general", "compiled"):
        command = ["--base", base, "--prompts", prompts, "--output", str(tmp_path / f"{step}.jsonl")]
        assert main(["distill", *command, "--max-new-tokens", "24", "--device", "cpu", "--step", step]) == 0
    assert read_rows(tmp_path / "compiled.jsonl") == read_rows(tmp_path / "general.jsonl")


FINE_FROM = ["--prompts", "fine.jsonl", "--endpoint", "http://x", "--model", "y"]


def test_where_no_answer_can_be_kept_the_program_says_why(serve, tmp_path, capsys):
    fake = serve()
    file = write_rows(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "b"})
    command = ["distill", "--prompts", str(file), "--model", "tiny", "--endpoint", fake.url]
    plain = fake.answer
    fake.answer = lambda request: {
        **plain(request),
        "choices": [{"message": {"role": "assistant", "content": " \n"}, "finish_reason": "stop"}],
    }
    said = ran(capsys, [*command, "--output", str(tmp_path / "a.jsonl")], 1).err.replace("\n", " ")
    assert "nothing was written: 2 of 2 answers hold no text, and were left out; choose another" in said
    assert "more time" not in said
    base, _ = save_chat_model(tmp_path)
    own = ["--base", base, "--prompt-free", "2", "--max-new-tokens", "6", "--device", "cpu"]
    said = ran(capsys, ["distill", *own, "--output", str(tmp_path / "b.jsonl")], 1).err.replace("\n", " ")
    assert "2 of 2 questions of the model's own did not end within --max-new-tokens" in said


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--prompts", "nowhere.jsonl"], "'nowhere.jsonl' does not exist"),
        (["--prompts", "bad.jsonl"], "bad.jsonl row 2 is not valid JSON"),
        (["--prompts", "fine.jsonl", "--endpoint", "http://x"], "--endpoint and --model go together"),
        ([*FINE_FROM, "--engine", "int8"], "--engine int8 is for a base in this process"),
        ([*FINE_FROM, "--step", "compiled"], "--step compiled is for a base in this process"),
        (["--prompt-free", "3", "--endpoint", "http://x", "--model", "y"], "--prompt-free needs the model"),
        (["--prompts", "fine.jsonl", "--max-minutes", "0"], "nothing was answered; give more time"),
    ],
)
def test_the_program_says_what_is_wrong_in_one_sentence(tmp_path, monkeypatch, capsys, arguments, complaint):
    monkeypatch.chdir(tmp_path)
    base, _ = save_chat_model(tmp_path)
    write_rows(tmp_path / "fine.jsonl", {"prompt": "hi"})
    (tmp_path / "bad.jsonl").write_text('{"prompt": "hi"}\n{"prompt"\n')
    options = ["--output", "rows.jsonl", "--base", base, "--device", "cpu"]
    said = ran(capsys, ["distill", *options, *arguments], 1).err
    assert f"error: {complaint}" in said.replace("\n", " ") or complaint in said
    assert "Traceback" not in said


def test_the_demo_prompts_are_readable_varied_and_disjoint():
    configs = CHECKOUT / "configs"
    training, held_out = (read_prompts(configs / f"demo_{name}.jsonl") for name in ("prompts", "heldout"))
    said = [prompt.messages[0]["content"] for prompt in (*training, *held_out)]
    assert len(set(said)) == len(said)
    assert len(training) >= 200
    assert {p.category for p in held_out} == {p.category for p in training}


def answer_from(fakes, tmp_path, num_prompts=3, minutes=None, concurrency=1, **options):
    """The rows and the report of a run over endpoints, and the seconds it took."""
    prompts = read_prompts(prompts_file(tmp_path, num_prompts))
    endpoints = [ChatEndpoint(fake.url, "tiny") for fake in fakes]
    answerer = EndpointAnswerer(endpoints, concurrency, MAX_NEW_TOKENS, **options)
    began = time.monotonic()
    with AnswerFile(tmp_path / "rows.jsonl", {}) as answers:
        waiting = unanswered(prompts, answers, (0.0,), 0)
        report = distill(waiting, answerer, answers, TimeLimit(minutes))
    return read_rows(tmp_path / "rows.jsonl"), report, time.monotonic() - began


def test_a_prompt_that_is_answered_with_garbage_costs_that_prompt_only(serve, tmp_path):
    fake = serve()
    answer = fake.answer
    fake.answer = lambda request: {} if request["messages"][-1]["content"].endswith("1") else answer(request)
    rows, report, _ = answer_from([fake], tmp_path)
    assert sorted(row["index"] for row in rows) == [0, 2]
    assert report.num_refused == 1


def test_a_key_that_expires_ends_the_run_and_keeps_what_was_answered(serve, tmp_path):
    fake = serve()
    answer = fake.answer

    def expiring(request):
        if len(fake.requests) == 2:
            fake.failures.append(401)
        return answer(request)

    fake.answer = expiring
    with pytest.raises(PermissionError, match="HTTP 401"):
        answer_from([fake], tmp_path)
    assert len(read_rows(tmp_path / "rows.jsonl")) == 2


def test_a_time_limit_waits_for_no_answer_and_keeps_those_that_have_arrived(serve, tmp_path):
    fake = serve()
    answer = fake.answer

    def slow_for_some(request):
        if request["messages"][-1]["content"].endswith(("1", "2")):
            time.sleep(8)
        return answer(request)

    fake.answer = slow_for_some
    rows, report, seconds = answer_from([fake], tmp_path, minutes=1 / 60, concurrency=3)
    assert [row["index"] for row in rows] == [0]
    assert seconds < 4
    assert report.num_unasked == 0


def test_what_has_arrived_when_the_time_is_up_is_not_thrown_away(serve, tmp_path, monkeypatch):
    queues = []

    class Noted(SimpleQueue):
        def __init__(self):
            queues.append(self)

    monkeypatch.setattr(endpoints, "SimpleQueue", Noted)
    prompts = read_prompts(prompts_file(tmp_path, 3))
    with AnswerFile(tmp_path / "rows.jsonl", {}) as answers:
        waiting = iter(unanswered(prompts, answers, (0.0,), 0))
    answerer, is_up = EndpointAnswerer([ChatEndpoint(serve().url, "tiny")], 3, MAX_NEW_TOKENS), [False]
    replies = answerer.replies(lambda: next(waiting, None), lambda _: None, lambda: is_up[0])
    next(replies)
    until = time.monotonic() + 60
    while queues[0].qsize() < 2 and time.monotonic() < until:
        time.sleep(0.01)
    is_up[0] = True
    assert len(list(replies)) == 2


def test_an_answer_with_reasoning_and_tool_calls_is_written_as_it_came(serve, tmp_path):
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    message = {"content": None, "reasoning_content": "Hm.", "tool_calls": [call]}
    fake = serve(body={"choices": [{"message": message, "finish_reason": "tool_calls"}]})
    rows, _, _ = answer_from([fake], tmp_path, num_prompts=1)
    assert rows[0]["messages"][-1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm.",
        "tool_calls": [call],
    }
    assert rows[0]["finish_reason"] == "stop"


def test_tools_and_template_options_of_a_prompt_travel_to_the_row(serve, tmp_path):
    fake = serve()
    row = {
        "prompt": "hi",
        "tools": [{"type": "function"}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    prompts = read_prompts(write_rows(tmp_path / "prompts.jsonl", row))
    with AnswerFile(tmp_path / "rows.jsonl", {}) as answers:
        waiting = unanswered(prompts, answers, (0.0,), 0)
        answerer = EndpointAnswerer([ChatEndpoint(fake.url, "tiny")], 1, MAX_NEW_TOKENS)
        distill(waiting, answerer, answers, TimeLimit(None))
    (written,) = read_rows(tmp_path / "rows.jsonl")
    assert written["tools"] == row["tools"]
    assert written["chat_template_kwargs"] == row["chat_template_kwargs"]
    assert fake.requests[0][1]["tools"] == row["tools"]


def test_answers_that_cannot_be_kept_are_counted_and_named_and_the_run_goes_on(serve, tmp_path, capsys):
    fake = serve()
    plain = fake.answer

    def answer(request):
        answered = plain(request)
        if "bad" in request["messages"][-1]["content"]:
            answered["choices"][0]["message"]["content"] = "half \ud83d"
        return answered

    fake.answer = answer
    rows = [{"prompt": text} for text in ("good", "bad 1", "bad 2", "bad 3")]
    file, output = write_rows(tmp_path / "p.jsonl", *rows), tmp_path / "rows.jsonl"
    command = ["distill", "--prompts", str(file), "--output", str(output), "--model", "tiny"]
    command += ["--endpoint", fake.url, "--batch-size", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("medusa.training.endpoints.time.sleep", lambda seconds: None)
        assert main([*command, "--limit", "2"]) == 0
        assert f"1 could not be answered, the first: {file} row 2: " in capsys.readouterr().err
        assert main(command) == 0, "the rows of earlier runs count"
    assert [row["index"] for row in read_rows(output)] == [0]


def test_several_endpoints_are_all_kept_busy(serve, tmp_path):
    """Each answers only when all have been asked as much as they take: with one idle, none ever would."""
    fakes = [serve(), serve(), serve()]
    together = threading.Barrier(6)
    for fake in fakes:
        plain = fake.answer
        fake.answer = lambda request, plain=plain: (together.wait(timeout=20), plain(request))[1]
    rows, _, _ = answer_from(fakes, tmp_path, 12, concurrency=2)
    assert sorted(row["index"] for row in rows) == list(range(12))
    assert [len(fake.requests) for fake in fakes] == [4, 4, 4]


def test_when_an_endpoint_dies_the_others_answer_what_it_was_asked(serve, tmp_path):
    said, dying, living = [], serve(), serve()
    plain, num_answered = dying.answer, []

    def mortal(request):
        num_answered.append(request)
        if len(num_answered) == 2:
            dying.failures += [503] * 100
        return plain(request)

    dying.answer = mortal
    rows, _, _ = answer_from([dying, living], tmp_path, 20, concurrency=2, say=said.append)
    assert sorted(row["index"] for row in rows) == list(range(20))
    (told,) = said
    assert told.startswith(f"{dying.url}/chat/completions is given up, 1 of 2 go on: endpoint")
    assert "HTTP 503" in told
    assert len(dying.requests) < 10 < len(living.requests)


def test_when_all_endpoints_die_the_run_fails_and_keeps_what_was_answered(serve, tmp_path, capsys):
    fakes = [serve(), serve()]
    for fake in fakes:
        fake.failures += [None] * 3 + [401] * 100  # the key expires
    file, output = prompts_file(tmp_path, 20), tmp_path / "answers.jsonl"
    urls = [fake.url for fake in fakes]
    command = ["distill", "--prompts", str(file), "--output", str(output), "--model", "tiny"]
    told = ran(capsys, [*command, "--endpoint", *urls, "--batch-size", "1"], 1).err
    assert "1 of 2 go on" in told
    assert "answered HTTP 401" in told
    assert len(read_rows(output)) == 6
    one = serve()
    assert main([*command, "--endpoint", one.url]) == 0  # another server of the same model goes on
    assert sorted(row["index"] for row in read_rows(output)) == list(range(20))
    assert len(one.requests) == 14
