"""Output parser: splits an answer into reasoning, text and tool calls, each passed on as its text comes.

Parsing is a generator that goes as far as the text allows, and yields where it needs more: complete answers
and streams share the code. Text that turns out to be no call stays text. The arguments of a call that has
ended are valid JSON.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from medusa.serving.body import json_value
from medusa.serving.json_repair import INVALID, JsonRepair, repaired
from medusa.serving.output_formats import CALL_ENDS, FENCE, OutputFormat, types_of
from medusa.text_stream import overlap

PYTHON_CALL = re.compile(r"\s*([A-Za-z_][\w.-]*)\(")
RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")
MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>")
ARGUMENTS = ("arguments", "parameters")
"""Keys under which models write the arguments of a call."""
CALL_KEYS = {"name", *ARGUMENTS, "type", "function", "id", "index"}
"""Keys of a call."""
TYPES: dict[type, set[str]] = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    str: {"string"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}
"""Names of the types of values in a schema."""


@dataclass(frozen=True)
class Part:
    """A stretch of an answer."""

    kind: Literal["reasoning", "text", "call", "arguments"]
    text: str
    """The text; for a call the name of the tool; for arguments more of the JSON of that call."""
    number: int = 0
    """Number of the call, from 0."""


Waiting = Generator[None, None, None]
Asking = Generator[None, None, bool]


class OutputParser:
    """Text in, parts out.

    Args:
        output_format: the syntax of the model.
        tools: the offered functions, by name; no others are called.
        most: largest number of calls; everything after them is dropped.
        in_reasoning: the prompt has opened the reasoning.
    """

    def __init__(
        self,
        output_format: OutputFormat,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        most: int | None = None,
        in_reasoning: bool = False,
    ):
        self.num_calls = 0
        self.is_call_open = False
        """The arguments of the last call are not whole."""
        self._format = output_format
        self._tools = tools or {}
        self._most = most
        self._is_thinking = in_reasoning
        self._held, self._at, self._is_whole = "", 0, False  # received text, parsed length
        self._is_cut = False
        self._end_mark = ""  # of the calls that are parsed
        self._blank, self._drops_blank = "", False
        self._parts: list[Part] = []
        self._reading = self._messages() if output_format.is_harmony else self._thoughts_and_rest()

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain now."""
        self._held += text
        return self._read_on()

    def finish(self, is_cut: bool = False) -> list[Part]:
        """The rest, at the end of the answer. A call that is open there is closed, unless the answer
        ``is_cut``: then nobody knows how it would go on."""
        self._is_whole = True
        self._is_cut = is_cut
        return self._read_on()

    def _read_on(self) -> list[Part]:
        next(self._reading, None)
        parts = self._parts
        self._parts = []
        return parts

    # What is found

    def _pass(self, kind: Literal["reasoning", "text"], text: str) -> None:
        """White space at the end waits for what follows: around reasoning and calls it is no answer."""
        text = self._blank + text
        text = text.lstrip() if self._drops_blank else text
        body = text.rstrip()
        self._blank = text[len(body) :]
        if body:
            self._parts.append(Part(kind, body))
            self._drops_blank = False

    def _say(self, text: str) -> None:
        self._pass("text", text)

    def _think(self, text: str) -> None:
        self._pass("reasoning", text)

    def _drop_blank(self) -> None:
        self._blank, self._drops_blank = "", True

    def _call(self, name: str) -> None:
        self._drop_blank()
        self.num_calls += 1
        self.is_call_open = self._most is None or self.num_calls <= self._most
        self._add("call", name)

    def _argue(self, text: str) -> None:
        self._add("arguments", text)

    def _add(self, kind: Literal["call", "arguments"], text: str) -> None:
        if text and (self._most is None or self.num_calls <= self._most):
            self._parts.append(Part(kind, text, self.num_calls - 1))

    # How text is taken

    def _commit(self) -> None:
        """Consumes the parsed text."""
        self._held = self._held[self._at :]
        self._at = 0

    def _until(self, marks: Collection[str], say: Callable[[str], object]) -> Generator[None, None, str]:
        """Hands text on as it comes, up to one of ``marks``, which is taken and returned; "" at the end."""
        while True:
            first_mark = min(
                ((at, mark) for mark in marks if (at := self._held.find(mark)) >= 0), default=None
            )
            kept = 0 if self._is_whole else max((overlap(self._held, mark) for mark in marks), default=0)
            end = len(self._held) - kept if first_mark is None else first_mark[0]
            say(self._held[:end])
            self._at = end if first_mark is None else end + len(first_mark[1])
            self._commit()
            if first_mark is not None or self._is_whole:
                return first_mark[1] if first_mark else ""
            yield

    def _skip(self, *words: str) -> Asking:
        """Whether one of ``words`` comes next, white space aside; it is then understood."""
        while True:
            rest = self._held[self._at :].lstrip()
            for word in words:
                if rest.startswith(word):
                    self._at = len(self._held) - len(rest) + len(word)
                    return True
            if self._is_whole or not any(word.startswith(rest) for word in words):
                return False
            yield

    def _string(self) -> Generator[None, None, str | None]:
        """The string that comes next, understood; None where there is none."""
        if not (yield from self._skip('"', "'")):
            return None
        self._at -= 1
        return _json((yield from self._whole_value()) or "")

    def _whole_value(self) -> Generator[None, None, str | None]:
        """The value that comes next as JSON, understood; None where it does not end."""
        repair = JsonRepair(self._end_mark)
        pieces = list[str]()
        while True:
            num_taken, text = repair.feed(self._held[self._at :])
            self._at += num_taken
            pieces.append(text)
            if repair.is_closed:
                return "".join(pieces)
            if self._is_whole:
                return None
            yield

    def _object(self, say: Callable[[str], object], begun: str = "") -> Asking:
        """Hands on the object that comes next as JSON, as it comes, behind ``begun``; whether it is whole."""
        repair = JsonRepair(self._end_mark)
        repair.feed(begun)
        while True:
            num_taken, text = repair.feed(self._held)
            say(text)
            self._held = self._held[num_taken:]
            if self._is_whole and not self._is_cut:
                say(repair.finish())
            if repair.is_closed or self._is_whole:
                return repair.is_closed
            yield

    # Reasoning, and then text and calls

    def _thoughts_and_rest(self) -> Waiting:
        begin, end = self._format.reasoning_tags
        if end and (self._is_thinking or (yield from self._skip(begin))):
            self._commit()
            self._drop_blank()
            yield from self._until([end], self._think)
            self._drop_blank()
        self._at = 0
        if self._tools and not (yield from self._calls_alone()):
            self._at = 0
        marks = self._format.call_marks if self._tools else ()
        while mark := (yield from self._until(marks, self._say)):
            if not (yield from self._marked_calls(mark)):
                self._at = 0
                self._say(mark)
        if not self.num_calls and not self._drops_blank and self._blank:
            self._parts.append(Part("text", self._blank))

    def _calls_alone(self) -> Asking:
        """Calls at the beginning, without marks: JSON, a list of it, or a list of calls as in Python."""
        if (yield from self._skip("{", "[")):
            self._at = 0
            return (yield from self._several_json_calls()) or (yield from self._python_calls())
        return False

    def _marked_calls(self, mark: str) -> Asking:
        if mark == "<function=":
            return (yield from self._xml_call())
        self._end_mark = CALL_ENDS[mark]
        if mark == FENCE:
            yield from self._skip("json")
        elif (yield from self._skip("<function=")):
            is_call = yield from self._xml_call()
            if is_call and (yield from self._skip("</tool_call>")):
                self._commit()
            return is_call
        has_calls = yield from self._several_json_calls()
        if has_calls and (yield from self._skip(self._end_mark)):
            self._commit()
        return has_calls

    def _several_json_calls(self) -> Asking:
        """Whether calls as JSON come next, one behind the other; taken then."""
        has_calls = more = yield from self._json_calls()
        while more:
            self._at = 0
            if (yield from self._skip(";", ",")):
                self._commit()
            more = yield from self._json_calls()
        return has_calls

    def _json_calls(self) -> Asking:
        """Whether a call as a JSON object comes next, or a list of them; taken then."""
        is_list = yield from self._skip("[")
        if not (yield from self._json_call()):
            self._at = 0
            return False
        while is_list and (yield from self._skip(",")) and (yield from self._json_call()):
            pass
        self._at = 0
        if is_list:
            yield from self._skip(",")
            if (yield from self._skip("]")):
                self._commit()
        return True

    def _json_call(self) -> Asking:
        if not (yield from self._skip("{")):
            return False
        begin = self._at - 1
        num_braces = 1
        while (yield from self._skip("{")):  # two, as some templates show a call to their model
            num_braces += 1
        key = yield from self._string()
        if key == "name" and (yield from self._skip(":")):
            name = yield from self._string()
            if name is None or name not in self._tools:
                return False
            if (yield from self._arguments_come()):
                self._commit()
                self._call(name)
                if (yield from self._object(self._argue)):
                    self.is_call_open = False
                yield from self._end_of_call(num_braces)
                return True
        elif key not in CALL_KEYS and not self._end_mark.startswith("</"):
            return False  # of other objects an answer may consist: they are not held back
        self._at = begin
        return (yield from self._call_by_whole_object())

    def _arguments_come(self) -> Asking:
        """Whether an object of arguments is the next field; understood up to its brace."""
        if not (yield from self._skip(",")) or (yield from self._string()) not in ARGUMENTS:
            return False
        if not (yield from self._skip(":")) or not (yield from self._skip("{")):
            return False
        self._at -= 1
        return True

    def _end_of_call(self, num_braces: int) -> Waiting:
        """Takes the end of a call's object, and fields before it that nobody reads, such as an id."""
        if (yield from self._skip(",")):
            behind_comma = self._at
            if (yield from self._skip('"', "'", "}")):
                self._at = behind_comma
                self._commit()
                yield from self._object(lambda text: None, begun="{")
                num_braces -= 1
        self._at = 0
        for _ in range(num_braces):
            if (yield from self._skip("}")):
                self._commit()

    def _call_by_whole_object(self) -> Asking:
        text = yield from self._whole_value()
        call = self._as_call(_json(text or ""))
        if call is None:
            return False
        self._commit()
        self._call(call[0])
        self._argue(_quoted(call[1]))
        self.is_call_open = False
        return True

    def _as_call(self, value: Any) -> tuple[str, Mapping[Any, Any]] | None:
        """The name and the arguments of a call; None where ``value`` is none."""
        match value:
            case {"function": {**function}}:
                value = function
        match value:
            case {"description": _}:  # the function, as the prompt shows it
                return None
            case {"name": str(name), "arguments": arguments} | {"name": str(name), "parameters": arguments}:
                pass
            case {"name": str(name), **others} if CALL_KEYS.issuperset(others) and not self._needs(name):
                arguments = {}
            case _:
                return None
        match arguments:
            case None:
                arguments = {}
            case str(text):
                arguments = _json(repaired(text))
        match arguments:
            case {**by_name} if name in self._tools:
                return name, by_name
        return None

    def _needs(self, name: str) -> Any:
        """The arguments that a call must have, if any."""
        return (self._tools.get(name, {}).get("parameters") or {}).get("required")

    def _xml_call(self) -> Asking:
        """``<function=name>``, and in it ``<parameter=key>`` with a value each, as Qwen3-Coder writes."""
        begin = self._at
        while (end := self._held.find(">", begin)) < 0:
            if self._is_whole:
                return False
            yield
        name = self._held[begin:end].strip()
        if name not in self._tools:
            return False
        self._at = end + 1
        self._commit()
        self._call(name)
        joint = "{"
        properties = (self._tools[name].get("parameters") or {}).get("properties") or {}
        while (yield from self._skip("<parameter=")):
            self._commit()
            key: list[str] = []
            yield from self._until([">"], key.append)
            named = "".join(key).strip()
            self._argue(f"{joint}{_quoted(named)}: ")
            joint = ", "
            yield from self._xml_value(properties.get(named))
        if not self._is_cut or (yield from self._skip("</function>")):
            self._argue("{}" if joint == "{" else "}")
            self.is_call_open = False
        for mark in ("</function>", "</tool_call>"):
            if (yield from self._skip(mark)):
                self._commit()
        return True

    def _xml_value(self, schema: Any) -> Waiting:
        """A text verbatim, or a value in Python or JSON syntax; both where ``schema`` leaves it open."""
        while not self._held and not self._is_whole:
            yield
        self._held = self._held.removeprefix("\n")
        ends = ["\n</parameter>", "</parameter>"]
        pieces = list[str]()
        types = types_of(schema)
        if not schema or types == {"string"}:
            self._argue('"')
            is_ended = yield from self._until(ends, lambda text: self._argue(_quoted(text)[1:-1]))
            if is_ended or not self._is_cut:
                self._argue('"')
        elif (yield from self._until(ends, pieces.append)) or not self._is_cut:
            text = "".join(pieces)
            value = _json(text)
            if value is None:
                arguments = _python(f"(value={text})") or {}
                value = arguments["value"] if [*arguments] == ["value"] else text
            fits = "string" not in types or types & TYPES.get(type(value), set())
            self._argue(_quoted(value if fits else text))

    def _python_calls(self) -> Asking:
        """Whether ``[name(key=value, ...), ...]`` came, as Llama 3.2 and 4 write; taken then."""
        if not (yield from self._skip("[")) or not (yield from self._python_call()):
            self._at = 0
            return False
        while (yield from self._skip(",")) and (yield from self._python_call()):
            pass
        if (yield from self._skip("]")):
            self._commit()
        return True

    def _python_call(self) -> Asking:
        begin = self._at
        while (head := PYTHON_CALL.match(self._held, begin)) is None:
            rest = self._held[begin:].strip()
            if self._is_whole or (rest and not re.fullmatch(r"[A-Za-z_][\w.-]*", rest)):
                return False
            yield
        if head[1] not in self._tools:
            return False
        end = head.end()
        while True:
            while (end := self._held.find(")", end) + 1) == 0:
                if self._is_whole:
                    return False
                end = len(self._held)
                yield
            arguments = _python(self._held[head.end() - 1 : end])
            if arguments is not None:
                break
        self._at = end
        self._commit()
        self._call(head[1])
        self._argue(_quoted(arguments))
        self.is_call_open = False
        return True

    # Harmony: messages on channels

    def _messages(self) -> Waiting:
        """Messages as gpt-oss writes them: the channel says whether it is reasoning or an answer, the
        recipient whether it is a call."""
        while True:
            head: list[str] = []
            is_message = yield from self._until(["<|message|>"], head.append)
            written = "".join(head)
            if not is_message:
                self._say("" if "<|" in written else written)
                break
            called = RECIPIENT.search(written)
            if called is not None and called[1] in self._tools:
                yield from self._called_message(called[1])
            else:
                say = self._think if "analysis" in written and called is None else self._say
                yield from self._until(MESSAGE_ENDS, say)
            self._drop_blank()

    def _called_message(self, name: str) -> Waiting:
        repair = JsonRepair()
        self._call(name)
        is_ended = yield from self._until(MESSAGE_ENDS, lambda text: self._argue(repair.feed(text)[1]))
        if is_ended or not self._is_cut:
            self._argue(repair.finish())
        if repair.is_closed:
            self.is_call_open = False


def _json(text: str) -> Any:
    """The value of ``text`` as JSON; None where it is invalid."""
    try:
        return json_value(text)
    except INVALID:
        return None


def _quoted(value: Any) -> str:
    """As JSON, with a question mark for halves of characters, which cannot be sent."""
    return json.dumps(value, ensure_ascii=False).encode(errors="replace").decode()


class _Names(ast.NodeTransformer):
    """JSON's names for Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        known = {"true": True, "false": False, "null": None}
        return ast.Constant(known[node.id]) if node.id in known else node


def _python(arguments: str) -> dict[str, Any] | None:
    """The arguments of a call, ``(key=value, ...)``, by name; None where they are not whole or no values."""
    try:
        call = _Names().visit(ast.parse(f"f{arguments}", mode="eval")).body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            return None
        values = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        json.dumps(values, allow_nan=False)
    except (*INVALID, TypeError):
        return None
    return values
