"""The grammars that answers must keep to, compiled for a tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from medusa.acceptance.grammar import (
    Grammar,
    GrammarCompiler,
    choice_rule,
    json_rule,
    lark_rule,
    pattern_rule,
)
from medusa.serving.output_formats import OutputFormat
from medusa.serving.replies import RequestError
from medusa.serving.shared_fields import SharedFields

TEXT_RULES: dict[str, Callable[[str, Any], str]] = {
    "json": json_rule,
    "regex": pattern_rule,
    "choice": choice_rule,
    "grammar": lark_rule,
}
"""The grammar rule for each kind of structured output."""


class AnswerGrammars:
    """The grammars of answers in the tokens of ``tokenizer``, of which ``end_ids`` end one."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = end_ids

    @functools.cached_property
    def _compiler(self) -> GrammarCompiler:
        return GrammarCompiler(self._tokenizer, self._vocab_size, self._end_ids)

    def of(self, request: SharedFields, output_format: OutputFormat, is_thinking: bool | None) -> Grammar:
        """The grammar of the answer to a request that ``is_formed``.

        Args:
            output_format: how the model writes answers.
            is_thinking: whether it goes on with its reasoning; None where it may begin it or not.

        Raises:
            RequestError: no grammar can keep to the form.
        """
        text = request.text_form
        must_call = request.must_call
        name = "tool_choice" if must_call or text is None else text.field
        try:
            grammars = self._compiler
            rules = [f"answer: {output_format.text_around(grammars.as_terminals)} text"]
            if must_call:
                rules = ["answer: call", *output_format.call_rules(must_call, grammars.as_terminals)]
            elif request.may_call:
                functions = [tool["function"] for tool in request.may_call]
                rules = [
                    f"{rules[0]} | {output_format.calls}",
                    *output_format.call_rules(functions, grammars.as_terminals),
                ]
            if text is not None and not must_call:
                rules.append(TEXT_RULES[text.kind]("text", text.constraint))
            before = output_format.reasoning_before(grammars.as_terminals, is_thinking)
            return grammars.compile(rules, *before)
        except (ImportError, ValueError) as error:
            raise RequestError(f"{name} cannot be kept: {error}", param=name) from error
