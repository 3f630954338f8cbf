"""Requests for embeddings, and their replies."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
)
from torch import Tensor

from medusa.serving.body import FIRST_ALONE, MAX_TOKENS, Body, Token, Whole
from medusa.serving.completion_requests import prompts_of

MAX_TEXTS = 2048
"""Texts of a request for embeddings, as many as OpenAI takes."""


class EmbeddingRequest(Body):
    """Texts to embed."""

    model: str | None = None
    dimensions: Annotated[Whole, Field(ge=1)] | None = None
    """The first numbers of each vector alone, at its length again: for models that are trained for it."""

    input: Any

    @property
    def is_cut(self) -> bool:
        """Whether a text that is too long is cut; else it is refused."""
        return False

    @property
    def texts(self) -> list[str | list[int]]:
        """Each text, or its tokens."""
        return prompts_of(self.input)

    def reply(self, name: str, vectors: Sequence[Tensor], num_tokens: int, seconds: float) -> dict[str, Any]:
        """The body of the reply for ``vectors``, (D,) float32 each, by the model called ``name``."""
        raise NotImplementedError


class EmbeddingsRequest(EmbeddingRequest):
    """``POST /v1/embeddings``."""

    input: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS), FIRST_ALONE]
        | Annotated[list[Token], Field(min_length=1, max_length=MAX_TOKENS), FIRST_ALONE]
        | Annotated[list[list[Token]], Field(min_length=1, max_length=MAX_TEXTS), FIRST_ALONE]
    )
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None

    def reply(self, name: str, vectors: Sequence[Tensor], num_tokens: int, seconds: float) -> dict[str, Any]:
        is_base64 = self.encoding_format == "base64"
        return {
            "object": "list",
            "data": [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": _as_base64(vector) if is_base64 else vector.tolist(),
                }
                for index, vector in enumerate(vectors)
            ],
            "model": name,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }


def _as_base64(vector: Tensor) -> str:
    """The numbers of ``vector``, four bytes each, the lowest first, as OpenAI's client asks for them."""
    return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
