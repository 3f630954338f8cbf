"""The texts of requests for embeddings, and their vectors as clients want them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from medusa.base.causal_lm import CausalLM, hidden_size
from medusa.base.pooling import Pooling, PoolingKind, stated_pooling
from medusa.serving.embedding_requests import EmbeddingRequest
from medusa.serving.prompts import TOO_LONG, PromptTokenizer
from medusa.serving.replies import RequestError

log = logging.getLogger("medusa.serving")


class EmbeddedTexts:
    """Requests for embeddings of ``base``, whose texts ``prompts`` turns into tokens.

    Args:
        pooling: for a base whose files state none; None refuses it.
    """

    def __init__(self, base: CausalLM, prompts: PromptTokenizer, pooling: PoolingKind | None):
        self._base = base
        self._prompts = prompts
        self._chosen = pooling

    @functools.cached_property
    def pooling(self) -> Pooling:
        """How a text becomes a vector.

        Raises:
            RequestError: the base is not made for it.
        """
        try:
            stated = stated_pooling(self._base)
        except ValueError as error:
            log.info("no embeddings: %s", error)
            raise RequestError(
                "this model states a form of embeddings that is not computed here; serve another one, such "
                "as Qwen3-Embedding",
                code="no_embeddings",
            ) from error
        if stated is not None:
            return stated
        if self._chosen is None:
            raise RequestError(
                "this model is not made for embeddings: its files state no pooling; serve one that is, such "
                "as Qwen3-Embedding, or have the server started with --embeddings last (or mean)",
                code="no_embeddings",
            )
        return Pooling(self._chosen)

    def tokens(self, request: EmbeddingRequest) -> list[list[int]]:
        """The tokens of each text, as the tokenizer reads one: with its marks at the beginning and the end.
        Texts that are too long are cut where the request says so, before the mark at the end."""
        _ = self.pooling  # refused, if at all, before anything is computed
        most = hidden_size(self._base)
        if request.dimensions is not None and request.dimensions > most:
            raise RequestError(
                f"dimensions must be at most {most}, those of this model, got {request.dimensions}; ask for "
                "fewer, or leave it out",
                param="dimensions",
            )
        max_characters = self._prompts.max_characters
        max_tokens = self._prompts.max_tokens
        texts = []
        for text in request.texts:
            if not text:
                raise RequestError("input must not hold empty texts; leave them out", param="input")
            ids = self._prompts.ids_of(text[:max_characters] if request.is_cut else text, "input")
            num_over = len(ids) - max_tokens
            if num_over > 0 and not request.is_cut:
                raise RequestError(
                    f"{TOO_LONG.format(max_tokens)}, and input has a text of {len(ids)}; shorten it",
                    param="input",
                    code="context_length_exceeded",
                    excess=(len(ids), max_tokens),
                )
            num_marks = len(self._end_marks) if ids[-1:] == self._end_marks else 0
            if num_over > 0:
                ids = [*ids[: max_tokens - num_marks], *ids[len(ids) - num_marks :]]
            texts.append(ids)
        return texts

    @functools.cached_property
    def _end_marks(self) -> list[int]:
        """The token that the tokenizer puts behind a text; [] for none."""
        ids = self._prompts.tokenizer("a")["input_ids"]
        bare = self._prompts.tokenizer("a", add_special_tokens=False)["input_ids"]
        return ids[-1:] if ids[-1:] != bare[-1:] else []

    def shortened(self, vectors: Sequence[Tensor], dimensions: int | None) -> list[Tensor]:
        """The first numbers of each vector, at length 1 where the whole one has it."""
        if dimensions is None:
            return [*vectors]
        first = [vector[:dimensions] for vector in vectors]
        if not self.pooling.is_normalised:
            return first
        return [torch.nn.functional.normalize(vector, dim=0) for vector in first]
