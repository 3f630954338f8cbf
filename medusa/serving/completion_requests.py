"""Requests with a text to go on with, or with a gap to fill."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    StrictBool,
    ValidationInfo,
    field_validator,
)

from medusa.serving.body import FIRST_ALONE, Body, Token, Whole
from medusa.serving.shared_fields import MAX_PARTS, SharedFields

MAX_PROMPTS = 64


class CompletionRequest(SharedFields):
    """``POST /v1/completions``."""

    suffix: str | None = None
    """The text after the answer, which then fills the gap; empty where the text ends there."""
    prompt: (
        str
        | Annotated[list[Token], FIRST_ALONE]
        | Annotated[list[str], FIRST_ALONE]
        | Annotated[list[Annotated[list[Token], FIRST_ALONE]], FIRST_ALONE]
    )
    logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    max_tokens: Annotated[Whole, Field(ge=0)] | None = 16
    """With 0 the prompt is read alone, for the next request, as in OpenAI's completions."""
    echo: StrictBool = False
    best_of: Whole | None = None

    @field_validator("prompt")
    @classmethod
    def _few_and_not_empty(cls, prompt: Any, fields: ValidationInfo) -> Any:
        if prompt and len(prompts_of(prompt)) > MAX_PROMPTS:
            raise ValueError(f"at most {MAX_PROMPTS} texts, got {len(prompt)}; send them in several requests")
        if prompt == [] or not (fields.data.get("suffix") or all(prompts_of(prompt))):
            raise ValueError("must not be empty")
        return prompt

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each gets ``n`` answers."""
        return prompts_of(self.prompt)

    @property
    def num_answers(self) -> int:
        return self.n * len(self.prompts)

    @property
    def asked(self) -> CompletionRequest:
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def refused(self) -> tuple[str, str] | None:
        if self.best_of and self.best_of != self.n:
            return "best_of", "this server has no best_of; leave it out"
        if self.echo and self.logprobs is not None:
            return "echo", "a prompt is given back without log-probabilities; leave echo or logprobs out"
        return super().refused()


class InfillRequest(CompletionRequest):
    """``POST /v1/fim/completions``, as Mistral has it: the text of a gap, in the form of a chat's answer."""

    prompt: str
    suffix: str = ""
    max_tokens: Annotated[Whole, Field(ge=0)] | None = None
    logprobs: None = None
    echo: Literal[False] = False


class OtherText(Body):
    """A text that the model is shown before the one with the gap."""

    text: str
    filename: str = "tmp"


class LlamaInfillRequest(InfillRequest):
    """``POST /infill``, with llama.cpp's names, values where a field is left out, and form of the answer."""

    prompt_name = "input_prefix"
    suffix_name = "input_suffix"

    suffix: Annotated[str, Field(alias="input_suffix")]
    prompt: Annotated[str, Field(alias="input_prefix")]
    begun: Annotated[str, Field(alias="prompt")] = ""
    """What the gap begins with."""
    others: Annotated[
        list[OtherText], Field(alias="input_extra", default_factory=list, max_length=MAX_PARTS), FIRST_ALONE
    ]
    max_tokens: Annotated[Whole, Field(alias="n_predict", ge=-1)] = -1
    """-1 is as many as the server allows."""
    n: Literal[1] = 1
    temperature: Annotated[float, Field(strict=True, ge=0, le=2)] = 0.8
    top_k: Annotated[Whole, Field(ge=-1, le=2**31)] = 40
    top_p: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.95
    min_p: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.05
    repetition_penalty: Annotated[float, Field(alias="repeat_penalty", strict=True, gt=0, le=10)] = 1.0

    @field_validator("seed")
    @classmethod
    def _any_seed(cls, seed: int | None) -> int | None:
        return None if seed == -1 else seed

    @property
    def longest(self) -> int | None:
        return None if self.max_tokens < 0 else self.max_tokens


def prompts_of(prompt: Any) -> list[str | list[int]]:
    """The texts of a field that holds one or several, each a text or its tokens."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
