"""Conversations as data files hold them, in the one form that everything here works with.

A message has ``role``, one of system, user, assistant and tool, and ``content``, text. An assistant's message
may have ``reasoning_content`` and ``tool_calls``, whose arguments are objects; other keys are kept.
:func:`read_messages` makes this of what other programs write, :func:`as_template` and :func:`as_openai` hand
it on: most chat templates want arguments as objects, OpenAI's protocol wants them as JSON text. A template
that writes a call as JSON shows its keys in their order, so calls and tools keep theirs.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jinja2

Message = dict[str, Any]
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
"""Other programs' names of the four roles, in lower case."""
MAX_NESTING = 64
"""Levels of a value in a row; Python's JSON breaks at some hundreds."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the reasoning in servers and templates; the first is ours."""
ANSWER_KEYS = (*_REASONING, "tool_calls", "function_call")
"""Keys of an assistant message that say something without content."""
_IS_TRAINED = ("train", "loss", "weight")
"""Keys of a message that say whether it is trained on: axolotl's, ms-swift's, and OpenAI's, a number."""
_OF_THE_ANSWER = ("reasoning_content", "thinking", *_IS_TRAINED)
"""Keys of a row with one answer that belong to it."""
_OF_A_SPEAKER = (
    "role",
    "from",
    "author",
    "speaker",
    "parent_id",
    "sender",
    "speaker_id",
    "message_role",
    "user_role",
    "parent_message_id",
    "message_tree_id",
    "reply_to",
)
"""Keys of a row, in any case, that make its text one message of a conversation."""
_SYSTEM = ("system", "system_prompt")
"""Keys of a row for its system message."""
_FOR_THE_TEMPLATE = ("tools", "chat_template_kwargs")
_OF_OPENAI = ("role", "content", "name", "tool_call_id", "reasoning_content")
"""Keys that servers take in a message, beside its calls."""


def read_messages(
    turns: Any, origin: str, role_key: str = "role", content_key: str = "content"
) -> list[Message]:
    """The messages in ``turns``, a list of objects with ``role_key`` and ``content_key``.

    An answer that shall not be trained on has ``train``, False; no other message has.

    Raises:
        ValueError: they cannot be read; the message begins with ``origin``.
    """
    if not isinstance(turns, list):
        raise ValueError(f"{origin}: a conversation must be a list of messages, got {type(turns).__name__}")
    numbered = enumerate(turns, start=1)
    return [_message(turn, role_key, content_key, f"{origin}, message {number}") for number, turn in numbered]


def _message(turn: Any, role_key: str, content_key: str, where: str) -> Message:
    says_more = isinstance(turn, dict) and any(turn.get(key) for key in ANSWER_KEYS)
    if not (isinstance(turn, dict) and role_key in turn and (content_key in turn or says_more)):
        raise ValueError(f"{where} must be an object with {role_key!r} and {content_key!r}, got {turn!r:.80}")
    called = checked_text(turn[role_key], role_key, where).lower()
    if called not in ROLES:
        raise ValueError(
            f"{where}: the role of a message must be one of {', '.join(ROLES)}, got {turn[role_key]!r:.80}; "
            "call it as one of these, or leave the message out"
        )
    role = ROLES[called]
    content = turn.get(content_key)
    known_keys = {role_key, content_key, *ANSWER_KEYS, *_IS_TRAINED}
    beside = {key: value for key, value in turn.items() if value is not None and key not in known_keys}
    check_finite(beside, where)
    calls = turn.get("tool_calls") or [each for each in [turn.get("function_call")] if each]
    if called == "function_call":  # its content is the call, as JSON text
        parsed_content = parsed_json(checked_text(content, content_key, where), f"{where}: {content_key}")
        calls = parsed_content if isinstance(parsed_content, list) else [parsed_content]
        content = None
    text = "" if role == "assistant" and content is None else _content(content, where)
    message: Message = {"role": role, "content": text, **beside}
    for key in _REASONING:
        if turn.get(key):
            message.setdefault("reasoning_content", checked_text(turn[key], key, where))
    if calls:
        if not isinstance(calls, list):
            raise ValueError(f"{where}: tool_calls must be a list, got {calls!r:.80}")
        message["tool_calls"] = [_call(call, where) for call in calls]
    if not _is_trained(turn, role, where) and role == "assistant":
        message["train"] = False
    return message


def _content(value: Any, where: str) -> str:
    """Plain text, or the text of a list of text parts."""
    if isinstance(value, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in value):
        return "".join(checked_text(part.get("text"), "text", where) for part in value)
    return checked_text(value, "content", where)


class NotText(ValueError):
    """A value that must be text and is none, such as a number or half of a character."""


def checked_text(value: Any, name: str, where: str) -> str:
    """``value``, which must be text; NotText where it is not."""
    if not isinstance(value, str):
        raise NotText(f"{where}: {name} must be text, got {value!r:.80}")
    return value


def _call(call: Any, where: str) -> dict[str, Any]:
    """A tool call as chat templates take it, given with or without ``function`` around."""
    function = call.get("function") or call if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"{where}: a tool call must be an object with function, and that one with name, got {call!r:.80}"
        )
    raw_arguments = arguments = function.get("arguments") or {}
    if isinstance(raw_arguments, str):
        arguments = (
            parsed_json(raw_arguments, f"{where}: arguments of a tool call") if raw_arguments.strip() else {}
        )
        check_keepable(arguments, f"{where}: arguments of a tool call")
    check_finite(arguments, f"{where}: arguments of a tool call")
    if not isinstance(arguments, dict):
        raise ValueError(
            f"{where}: arguments of a tool call must be a JSON object, got {raw_arguments!r:.80}"
        )
    if function is call:
        function = {key: value for key, value in call.items() if key not in ("id", "type")}
        call = {key: call[key] for key in ("id", "type") if key in call}
    return written_call({**call, "function": {**function, "arguments": arguments}})


def written_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """``call``, in the order of its keys, without nulls and with ``type``, which some templates write."""
    fields = {key: value for key, value in call.items() if value is not None}
    if "type" in fields:
        return fields
    before = {key: fields.pop(key) for key in [*fields] if key != "function"} if "function" in fields else {}
    return {**before, "type": "function", **fields}


def _is_trained(turn: Mapping[str, Any], role: str, where: str) -> bool:
    flags = {key: turn[key] for key in _IS_TRAINED if turn.get(key) is not None}
    for key, value in flags.items():
        if value not in (0, 1):
            raise ValueError(
                f"{where}: {key} must be {'0 or 1' if key == 'weight' else 'true or false'}, since a message "
                f"is trained on or not, got {value!r:.80}"
            )
        if value and role != "assistant":
            raise ValueError(
                f"{where}: {key} must not be {value!r} in a message of the {role}, which is context; leave "
                f"{key} out"
            )
    return all(flags.values())


def opened(row: Mapping[str, Any], messages: Iterable[Message], origin: str) -> tuple[Message, ...]:
    """``messages`` after the system message of ``row``, if it has one.

    Raises:
        ValueError: it has another one than they have, or a ``history``, which they have in them.
    """
    conversation = list(messages)
    if row.get("history"):
        raise ValueError(
            f"{origin}: history goes with one question and its answer, got it beside whole messages; put its "
            "turns among them, or leave it out"
        )
    own = conversation[0]["content"] if conversation and conversation[0]["role"] == "system" else None
    system = _system(row, origin)
    if system and own is not None and own.strip() != system.strip():
        raise ValueError(
            f"{origin} has two system messages, {system!r:.40} beside the messages and {own!r:.40} among "
            "them; leave one out"
        )
    return tuple(
        conversation
        if own is not None or not system
        else [{"role": "system", "content": system}, *conversation]
    )


def exchange(row: Mapping[str, Any], question: str, answer: str | None, origin: str) -> tuple[Message, ...]:
    """One question, and its answer unless it is None, after the ``system`` message and the ``history`` of
    ``row``: pairs of a question and an answer.

    Raises:
        ValueError: these cannot be read.
    """
    system = _system(row, origin)
    history = row.get("history") or []
    are_pairs = isinstance(history, list) and all(isinstance(pair, list | tuple) for pair in history)
    if not are_pairs or any(len(pair) != 2 for pair in history):
        raise ValueError(
            f"{origin}: history must be a list of pairs, a question and its answer, got {history!r:.80}"
        )
    turns: list[Message] = [{"role": "system", "content": system}] if system else []
    for earlier_question, earlier_answer in history:
        turns += [
            {"role": "user", "content": earlier_question},
            {"role": "assistant", "content": earlier_answer},
        ]
    turns.append({"role": "user", "content": question})
    if answer is not None:
        beside = {key: row[key] for key in _OF_THE_ANSWER if row.get(key) is not None}
        turns.append({"role": "assistant", "content": answer, **beside})
    return tuple(read_messages(turns, origin))


def as_template(messages: Iterable[Message], tokenizer: Any) -> list[Message]:
    """``messages`` as the chat template of ``tokenizer`` reads them, with the reasoning under every name that
    templates have for it.

    Templates of models that read images too may want content in parts, as LLaVA's does; given a text they
    leave it out without a word.

    Arguments of calls that are JSON text become objects for templates that take these. Text that is no
    object, such as a call that a length limit has cut, stays text; a template that goes through arguments by
    name, as Qwen3-Coder's does, gets it under the name ``arguments``.
    """
    template_messages = [
        {**message, "thinking": message["reasoning_content"]} if message.get("reasoning_content") else message
        for message in messages
    ]
    template = str(tokenizer.chat_template)
    template_messages = [
        _with_parts(message) if _wants_parts(tokenizer, template, message["role"]) else message
        for message in template_messages
    ]
    if not any(message.get("tool_calls") for message in template_messages):
        return template_messages
    if _joins(tokenizer, template):
        return [_with_arguments(message, _as_text) for message in template_messages]
    takes_text = _takes_text(tokenizer, template)
    return [
        _with_arguments(message, lambda arguments: _as_object(arguments, takes_text=takes_text))
        for message in template_messages
    ]


def as_openai(messages: Iterable[Message]) -> list[Message]:
    """``messages`` as OpenAI's protocol writes them, without keys that it does not know."""
    known = (*_OF_OPENAI, "tool_calls")
    written = [
        _with_arguments({key: message[key] for key in known if key in message}, _as_text)
        for message in messages
    ]
    for call in (call for message in written for call in message.get("tool_calls") or ()):
        named = {key: call[key] for key in ("id", "type") if key in call}
        function = {key: call["function"][key] for key in ("name", "arguments")}
        call.clear()
        call.update({**named, "function": function})
    return written


def _with_parts(message: Message) -> Message:
    """``message`` with its content in one part, where it is a text."""
    content = message["content"]
    return (
        {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
    )


@functools.lru_cache(maxsize=64)
def _wants_parts(tokenizer: Any, template: str, role: str) -> bool:
    """Whether ``template``, the tokenizer's own, shows what a message of ``role`` says in parts alone."""
    text = "the content of a message"
    user_messages: list[Message] = []
    if role != "user":
        question = {"role": "user", "content": "a question"}
        user_messages = [_with_parts(question) if _wants_parts(tokenizer, template, "user") else question]
    probe = {"role": role, "content": text}

    def shows(message: Message) -> bool:
        try:
            order = [message, *user_messages] if role == "system" else [*user_messages, message]
            return text in tokenizer.apply_chat_template(order, tokenize=False)
        except (jinja2.TemplateError, TypeError):
            return False

    return not shows(probe) and shows(_with_parts(probe))


def _with_arguments(message: Message, written: Callable[[Any], Any]) -> Message:
    """``message`` with the arguments of its calls as ``written`` gives them, in their place."""
    if not message.get("tool_calls"):
        return message
    calls = [{**call, "function": dict(call["function"])} for call in message["tool_calls"]]
    for call in calls:
        call["function"]["arguments"] = written(call["function"]["arguments"])
    return {**message, "tool_calls": calls}


def _as_text(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments if arguments.strip() else "{}"
    return json.dumps(arguments, ensure_ascii=False)


def _as_object(arguments: Any, *, takes_text: bool) -> Any:
    """The object in ``arguments``; where they are text that holds none, that text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = parsed_json(arguments if arguments.strip() else "{}", "arguments")
        check_keepable(parsed, "arguments")
        check_finite(parsed, "arguments")
    except ValueError:
        parsed = None
    if isinstance(parsed, dict):
        return parsed
    return arguments if takes_text else {"arguments": arguments}


def _with_a_call(tokenizer: Any, arguments: Any) -> str:
    """A conversation with a call of ``arguments``, as the tokenizer's chat template writes it; empty where it
    refuses them."""
    call = {"type": "function", "function": {"name": "function", "arguments": arguments}}
    question = {"role": "user", "content": "a question"}
    try:
        messages = [question, {"role": "assistant", "content": "", "tool_calls": [call]}]
        return tokenizer.apply_chat_template(messages, tokenize=False)
    except (jinja2.TemplateError, TypeError):
        return ""


@functools.lru_cache(maxsize=8)
def _joins(tokenizer: Any, template: str) -> bool:
    """Whether ``template``, the tokenizer's own, writes arguments as they are, as DeepSeek's does.
    It must get text, where others write an object as JSON."""
    arguments = {"name": "value"}
    text = json.dumps(arguments)
    of_text = _with_a_call(tokenizer, text)
    of_object = _with_a_call(tokenizer, arguments)
    return text in of_text and (not of_object or repr(arguments) in of_object)


@functools.lru_cache(maxsize=8)
def _takes_text(tokenizer: Any, template: str) -> bool:
    """Whether ``template``, the tokenizer's own, shows arguments that are text and no object."""
    text = "arguments cut"
    return text in _with_a_call(tokenizer, text)


def _system(row: Mapping[str, Any], origin: str) -> str:
    system_texts = {name: checked_text(row[name], name, origin) for name in _SYSTEM if row.get(name)}
    if len({*system_texts.values()}) > 1:
        raise ValueError(f"{origin} has two system messages, {' and '.join(system_texts)}; leave one out")
    return next(iter(system_texts.values()), "")


def refuse_beside_messages(row: Mapping[str, Any], origin: str) -> None:
    """Raise ValueError where ``row`` says something of one message beside all of them."""
    misplaced = [key for key in _OF_THE_ANSWER if row.get(key) and key not in _IS_TRAINED]
    misplaced += [key for key in _IS_TRAINED if row.get(key) not in (None, 1)]
    if misplaced:
        raise ValueError(
            f"{origin}: {misplaced[0]} belongs to one message, got it beside all of them; put it into that "
            "message, or leave it out"
        )


def refuse_beside_text(row: Mapping[str, Any], origin: str) -> None:
    """Raise ValueError where ``row`` says something of a conversation beside a text, which is none."""
    refuse_beside_messages(row, origin)
    speaker_key = next(
        (key for key in row if str(key).lower() in _OF_A_SPEAKER and row[key] is not None), None
    )
    if speaker_key:
        raise ValueError(
            f"{origin}: text must be the model's own words, and {speaker_key} says that somebody speaks, got "
            f"{row[speaker_key]!r:.40}; give the conversation as messages, a tree of messages with "
            f"message_id, parent_id, role and text in each row, or leave {speaker_key} out"
        )
    misplaced = [key for key in (*_SYSTEM, "history", *_FOR_THE_TEMPLATE) if row.get(key)]
    if misplaced:
        raise ValueError(
            f"{origin}: {misplaced[0]} belongs to a conversation, got it beside text, which is trained on as "
            "it is; give messages in place of text, or leave it out"
        )


@functools.cache
def reserved_names() -> frozenset[str]:
    """Arguments of ``apply_chat_template`` and of its rendering that no row may set."""
    from transformers import PreTrainedTokenizerBase
    from transformers.utils.chat_template_utils import render_jinja_template

    functions = (PreTrainedTokenizerBase.apply_chat_template, render_jinja_template)
    names = {name for function in functions for name in inspect.signature(function).parameters}
    return frozenset(names | {"messages"}) - {"documents", "kwargs"}


def template_options(row: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The chat template options of ``row``: ``tools``, and its ``chat_template_kwargs``.

    Raises:
        ValueError: they are of another type, or would replace the model's template or how it is rendered.
    """
    tools = row.get("tools")
    kwargs = row.get("chat_template_kwargs")
    if isinstance(tools, str):  # as data sets keep it whose rows must all be alike
        tools = parsed_json(tools, f"{origin}: tools") if tools.strip() else None
    if row.get("functions"):
        raise ValueError(f"{origin}: functions is the older form of tools; give tools in its place")
    for name, value, kind in (("tools", tools, list), ("chat_template_kwargs", kwargs, dict)):
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{origin}: {name} must be a {kind.__name__}, got {value!r:.80}")
    check_finite([tools, kwargs], origin)
    for name, value in (("tools", tools), ("documents", (kwargs or {}).get("documents"))):
        is_list = isinstance(value, list) and all(isinstance(each, dict) for each in value)
        if value is not None and not is_list:
            raise ValueError(f"{origin}: {name} must be a list of objects, got {value!r:.80}")
    taken = sorted(reserved_names() & set(kwargs or ()))
    if taken:
        raise ValueError(
            f"{origin}: chat_template_kwargs are variables of the model's chat template, got {taken}, which "
            "say how it is rendered; leave them out"
        )
    return {**({"tools": tools} if tools else {}), **(kwargs or {})}


def template_columns(options: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a row from which :func:`template_options` reads ``options``."""
    kwargs = {name: value for name, value in options.items() if name != "tools"}
    tools = options.get("tools")
    return {**({"tools": tools} if tools else {}), **({"chat_template_kwargs": kwargs} if kwargs else {})}


def check_template_kwargs(template_kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError where ``template_kwargs`` would replace the model's chat template or how it is
    rendered."""
    template_options({"chat_template_kwargs": template_kwargs}, "the options")


def check_keepable(value: Any, origin: str, most: int = MAX_NESTING) -> None:
    """Raise ValueError unless ``value``, of JSON, can be rendered and written again: ``most`` levels deep.

    Half of a surrogate pair, which JSON can spell, is no text in UTF-8: NotText.
    """
    level = [value]
    for _ in range(most):
        try:
            "".join(each for each in level if isinstance(each, str)).encode()
        except UnicodeEncodeError as error:
            raise NotText(
                f"{origin} holds text that is not Unicode, half of a surrogate pair "
                f"({error.object[error.start]!r}); replace it"
            ) from error
        lists = [each for each in level if isinstance(each, list | tuple)]
        objects = [each for each in level if isinstance(each, Mapping)]
        level = [item for each in lists for item in each]
        level += [item for each in objects for pair in each.items() for item in pair]
        if not level:
            return
    raise ValueError(f"{origin} is nested deeper than {most} levels; flatten it")


def check_finite(value: Any, origin: str) -> None:
    """Raise ValueError where a number in ``value``, from JSON, is infinite or NaN: Python reads these and
    writes invalid JSON."""
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, float) and not math.isfinite(item):
            raise ValueError(
                f"{origin}: numbers must be finite, as JSON has no other, got {item}; leave it out"
            )
        rest += item.values() if isinstance(item, Mapping) else item if isinstance(item, list | tuple) else ()


def parsed_json(raw: str | bytes, origin: str) -> Any:
    """The JSON value in ``raw``.

    Raises:
        ValueError: it is none, or too deep to be read; the message names ``origin``.
    """
    try:
        # json.loads would accept UTF-16 too, which is not split into lines correctly
        value = json.loads(raw if isinstance(raw, str) else raw.decode("utf-8-sig"))
    except ValueError as error:  # bad JSON and bad UTF-8 alike
        raise ValueError(f"{origin} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{origin} is nested deeper than {MAX_NESTING} levels; flatten it") from error
    return value
