"""Output formats of models, detected from the chat template: the tags of reasoning, and the syntax of tool
calls.

:mod:`medusa.serving.output_parser` reads all of them; this module detects the format of a model, and gives
the grammar rules (Lark, as llguidance reads it) for calls in it.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from medusa.acceptance.grammar import json_rule
from medusa.prompts import reasoning_tags

HARMONY = ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>")
"""Control tokens of the messages of gpt-oss; the answer is on the channel ``final``."""
FENCE = "```"
CALL_ENDS = {"<tool_call>": "</tool_call>", "<tools>": "</tools>", FENCE: FENCE}
"""Marks before a call as JSON, and what ends it. Models that were not trained for the tags of their template,
such as Qwen2.5-Coder, write the last two."""
NO_PARAMETERS = {"properties": {}, "additionalProperties": False}
"""Parameters of a function that declares none."""
NAMES = {
    "xml": re.compile(r"[\w.-]+"),
    "python": re.compile(r"[A-Za-z_][\w.-]*"),
    "harmony": re.compile(r"[\w.-]+"),
}
"""Names of functions that the forms can hold in which they are no JSON."""
ANNOTATIONS = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$comment", "$schema", "$id"),
}
"""Keys of a schema that ask nothing of a value."""
OF_PARAMETERS = {
    *("type", "properties", "required", "additionalProperties", "$defs", "definitions", *ANNOTATIONS),
}
"""Keys of the schema of all parameters that can be kept where parameters are written one by one."""
Terminals = Callable[[str], str]
"""A text as a part of a grammar: its control tokens as tokens."""


@dataclass(frozen=True)
class OutputFormat:
    """The syntax of a model's reasoning and tool calls."""

    reasoning_tags: tuple[str, str] = ("", "")
    """The opening and closing tags of reasoning; empty where the template has none."""
    call: Literal["hermes", "xml", "python", "json", "harmony"] = "json"
    """How a forced call is written."""
    arguments_key: str = "arguments"

    @property
    def is_harmony(self) -> bool:
        return self.call == "harmony"

    @property
    def call_marks(self) -> tuple[str, ...]:
        """Marks that begin a call in the middle of an answer."""
        if self.call == "hermes":
            return tuple(CALL_ENDS)
        return ("<tool_call>", "<function=") if self.call == "xml" else ("<tool_call>",)

    @property
    def marks(self) -> tuple[str, ...]:
        """Control tokens that separate the parts of an answer."""
        return (
            HARMONY
            if self.is_harmony
            else (*filter(None, self.reasoning_tags), "<tool_call>", "</tool_call>")
        )

    @property
    def unsearched(self) -> tuple[str, str]:
        """The beginning and the end of the part of an answer in which no stop string is looked for: its
        reasoning, and the messages of gpt-oss before the last one."""
        return ("<|channel|>", "<|channel|>final<|message|>") if self.is_harmony else self.reasoning_tags

    def reasoning_before(self, as_terminals: Terminals, in_reasoning: bool | None) -> tuple[str, list[str]]:
        """The reasoning before an answer that keeps to a grammar, as a part of its start rule, and the rules
        for it.

        Args:
            in_reasoning: whether the prompt has begun the reasoning, so that it must end; False where it has
                ended it, None where there may be some or none.
        """
        begin, end = self.reasoning_tags
        if self.is_harmony:
            begin, end = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
        if not end or in_reasoning is False:
            return "", []
        rest = r"/\n{0,2}/"
        if as_terminals(end) == json.dumps(end):  # no token of its own
            rules = [f"thoughts: thought {rest}", f"thought[suffix={json.dumps(end)}]: /(?s:.*)/"]
        else:
            rules = [f"thoughts: /(?s:.*)/ {as_terminals(end)} {rest}"]
        return ("thoughts" if in_reasoning else f"({as_terminals(begin)} thoughts)?"), rules

    def text_around(self, as_terminals: Terminals) -> str:
        """The text before an answer that is no call."""
        return as_terminals("<|channel|>final<|message|>") if self.is_harmony else ""

    @property
    def calls(self) -> str:
        """One call or more, of the rule ``call``."""
        return r'call ("\n" call)*' if self.call in ("hermes", "xml") else "call"

    def call_rules(self, functions: Sequence[Mapping[str, Any]], as_terminals: Terminals) -> list[str]:
        """``call``, which is one call of one of ``functions``, and the rules below it.

        Raises:
            ValueError: this form cannot hold a call of one of them, or not what its parameters must be.
        """
        rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(functions)))]
        for index, function in enumerate(functions):
            parameters = function.get("parameters")
            schema = {"type": "object", **(NO_PARAMETERS if parameters is None else parameters)}
            self._check_name(function["name"], as_terminals)
            if self.call in ("xml", "python"):
                rules += _by_parameter(self.call, index, function["name"], schema, as_terminals)
                continue
            before, after = self._around_arguments(function["name"])
            end = f" {as_terminals(after)}" if after else ""
            rules += [
                f"call_{index}: {as_terminals(before)} given_{index}{end}",
                json_rule(f"given_{index}", schema),
            ]
        return rules

    def _check_name(self, name: str, as_terminals: Terminals) -> None:
        is_read = (
            NAMES[self.call].fullmatch(name) if self.call in NAMES else as_terminals(name) == json.dumps(name)
        )
        if not is_read:
            raise ValueError(
                f"the name of the function {name!r} could not be read again in the form in which this model "
                "calls; use letters, digits and _"
            )

    def _around_arguments(self, name: str) -> tuple[str, str]:
        if self.is_harmony:
            return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", ""
        before = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{self.arguments_key}": '
        return (f"<tool_call>\n{before}", "}\n</tool_call>") if self.call == "hermes" else (before, "}")


def detect_format(template: str) -> OutputFormat:
    """The form that a chat template shows to its model."""
    tags = reasoning_tags(template)
    if "<|channel|>" in template and "<|message|>" in template:
        return OutputFormat(call="harmony")
    if "<function=" in template:
        return OutputFormat(tags, "xml")
    if "<tool_call>" in template:
        return OutputFormat(tags, "hermes")
    if "<|python_start|>" in template or "func_name1(" in template:
        return OutputFormat(tags, "python")
    return OutputFormat(tags, "json", "parameters" if '"parameters": ' in template else "arguments")


def types_of(schema: Any) -> set[str]:
    """The types that a schema names; none where it names none."""
    named = [alternative.get("type") for alternative in _alternatives(schema)]
    flat = [name for names in named for name in (names if isinstance(names, list) else [names])]
    return {name for name in flat if isinstance(name, str)}


def _alternatives(schema: Any) -> list[Mapping[str, Any]]:
    """The alternatives of a schema; a value keeps to one of them."""
    if not isinstance(schema, Mapping):
        return []
    inner = [each for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list) for each in schema[key]]
    return [leaf for each in inner for leaf in _alternatives(each)] or [schema]


def _may_be_any_text(schema: Any) -> bool:
    text_alternatives = [
        alternative for alternative in _alternatives(schema) if "string" in types_of(alternative)
    ]
    return not schema or any("enum" not in each and "const" not in each for each in text_alternatives)


def _check_parameters(kind: str, name: str, schema: Mapping[str, Any]) -> None:
    """Raise ValueError unless everything in ``schema`` about the parameters of ``name`` can be kept, with
    parameters written one by one, and parsed."""
    of = f"the parameters of {name!r}"
    properties = schema.get("properties") or {}
    types = schema["type"]
    if "object" not in (types if isinstance(types, list) else [types]):
        raise ValueError(f"{of} must be an object, got {types!r:.40}")
    unkept = sorted({*schema} - OF_PARAMETERS)
    if unkept:
        raise ValueError(
            f"{unkept[0]!r:.60} of {of} cannot be kept in the form in which this model calls; leave it out"
        )
    for key in schema.get("required") or ():
        if key not in properties:
            raise ValueError(f"{of} require {key!r:.60}, which is not among their properties; describe it")
    for key, value in properties.items():
        is_named = key.isidentifier() and key.isascii() and not keyword.iskeyword(key)
        if not (is_named if kind == "python" else key == key.strip() and not {*key} & {*">\n"}):
            raise ValueError(
                f"the parameter {key!r:.60} of {name!r} could not be read again in the form in which this "
                "model calls; use letters, digits and _"
            )
        if kind == "xml":
            _check_text(f"the parameter {key!r:.60} of {name!r}", value)


def _check_text(of: str, schema: Any) -> None:
    """Raise ValueError where a parameter that may be a text, which is written verbatim, has further
    constraints."""
    if schema is False:
        raise ValueError(f"{of} may be nothing; leave it out")
    is_any = _may_be_any_text(schema)
    if is_any or types_of(schema) == {"string"}:
        kept = {"type"} if is_any else {"type", "enum", "const"}
        unkept = sorted(_keys_of(schema, kept))
        if unkept:
            raise ValueError(
                f"{unkept[0]!r:.60} of {of}, a text, cannot be kept in the form in which this model calls; "
                "leave it out, or list the texts under enum"
            )


def _keys_of(schema: Any, kept: set[str]) -> set[str]:
    """The keys that ask something of a value, of a schema and its alternatives, where no ``kept`` ones."""
    if not isinstance(schema, Mapping):
        return set()
    inner = [each for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list) for each in schema[key]]
    keys = {*schema} - ANNOTATIONS - ({"type", "anyOf", "oneOf"} if inner else kept)
    return keys.union(*(_keys_of(each, kept) for each in inner))


def _texts_of(schema: Mapping[str, Any]) -> list[str]:
    """The allowed texts of a parameter that is an enumeration."""
    named = [
        alternative["enum"] if "enum" in alternative else [alternative["const"]]
        for alternative in _alternatives(schema)
    ]
    texts = [text for each in named for text in each if isinstance(text, str) and "</parameter>" not in text]
    if not texts:
        raise ValueError("enum and const of a text must name texts, and none that ends a parameter")
    return texts


def _by_parameter(
    kind: str, index: int, name: str, schema: Mapping[str, Any], as_terminals: Terminals
) -> list[str]:
    """A call with its parameters one by one, in the order of the schema: required ones first."""
    _check_parameters(kind, name, schema)
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    properties = schema.get("properties") or {}
    required = [key for key in schema.get("required") or () if key in properties]
    keys = [*required, *(key for key in properties if key not in required)]
    rules = []
    end = json.dumps("\n</parameter>\n") if kind == "xml" else ""
    for number, key in enumerate(keys):
        value = properties[key]
        place = f"{index}_{number}"
        begin = f"<parameter={key}>\n" if kind == "xml" else f"{key}="
        is_any = kind == "xml" and _may_be_any_text(value)  # verbatim, up to the first mark
        rules.append(f"given_{place}: {json.dumps(begin)} value_{place}" + (' "\\n"' if is_any else ""))
        if is_any:
            rules.append(f'value_{place}[suffix="</parameter>"]: /(?s:.*)/')
        elif kind == "xml" and types_of(value) == {"string"}:
            rules.append(f"value_{place}: ({' | '.join(map(json.dumps, _texts_of(value)))}) {end}")
        else:
            schema_of_value = {**definitions, **value} if isinstance(value, Mapping) else {"not": {}}
            rules += [f"value_{place}: json_{place} {end}", json_rule(f"json_{place}", schema_of_value)]
    names = [f"given_{index}_{number}" for number in range(len(keys))]
    first = names[: len(required)]
    rest = names[len(required) :]
    if kind == "xml":
        before = as_terminals(f"<tool_call>\n<function={name}>\n")
        after = as_terminals("</function>\n</tool_call>")
        return [f"call_{index}: {' '.join([before, *first, *(f'{each}?' for each in rest), after])}", *rules]
    behind = [f'(", " {each})?' for each in rest]
    parameters = " ".join([' ", " '.join(first), *behind])
    if not first and rest:
        parameters = f"({' | '.join(' '.join([each, *behind[at:]]) for at, each in enumerate(rest, 1))})?"
    return [f"call_{index}: {json.dumps(f'[{name}(')} {parameters} {json.dumps(')]')}", *rules]
