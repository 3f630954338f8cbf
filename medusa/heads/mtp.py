"""A base's own layers for multi-token prediction, as autoregressive heads (DeepSeek-V3, arXiv 2412.19437,
section 2.2).

The modules are ``transformers``' own, which drops their weights when it loads a base: each is a layer of the
base's kind, over a projection of [embedding, feature]. Most bases have one.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from medusa.base.causal_lm import CausalLM, hidden_size, vocab_size
from medusa.base.gguf_file import GGUFFile
from medusa.base.loading import gguf_model, gguf_path
from medusa.base.passes import cache_argument
from medusa.console import counted
from medusa.heads.autoregressive_head import AutoregressiveHead, Drafted
from medusa.heads.draft_vocab import MAX_LAYERS, MAX_SIZE
from medusa.heads.medusa_heads import MAX_DEPTH
from medusa.options import check_counts, is_count

_NEEDED = f"transformers 5.23 or newer, got {transformers.__version__}; pip install --upgrade transformers"
UNSAID = {"qwen3_next": 1, "qwen3_5_text": 1, "qwen3_5_moe_text": 1}
"""Number of MTP layers of bases whose configuration in ``transformers`` lacks it; mtp_num_hidden_layers
overrides it."""


def num_mtp_layers(config: PreTrainedConfig) -> int:
    """How many layers for multi-token prediction a base comes with, as far as its configuration says."""
    text = config.get_text_config(decoder=True)
    if text.model_type in UNSAID:
        return getattr(text, "mtp_num_hidden_layers", UNSAID[text.model_type])
    return getattr(text, "num_mtp_layers", None) or 0


def can_draft_itself(config: PreTrainedConfig) -> bool:
    """Whether a base brings layers for multi-token prediction that can be loaded here, as far as its
    configuration says."""
    return num_mtp_layers(config) > 0 and _modules() is not None


def mtp_unsupported_reason(base: CausalLM) -> str | None:
    """The missing requirement of the MTP layers of ``base``; None if none is known."""
    if not num_mtp_layers(base.config):
        return (
            f"a base that comes with layers for multi-token prediction, and {type(base).__name__} has none; "
            "train heads for it"
        )
    if not base.name_or_path:
        return "the files that the base was loaded from, and it was made in memory; save and load it first"
    return None if _modules() else _NEEDED


def _modules() -> Any:
    """``transformers``' own ``MtpModel``; None where it has none that can be filled."""
    is_new = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)  # older ones load no weights
    return getattr(transformers.modeling_layers, "MtpModel", None) if is_new else None


@dataclass(frozen=True, kw_only=True)
class MtpConfig:
    """The configuration of the layers."""

    hidden_size: int
    """D."""
    vocab_size: int
    """V of the base model's LM head."""
    base_config: Mapping[str, Any]
    """The base's configuration, as in ``transformers``: the layers are of its classes and sizes."""
    max_depth: int
    """How far ahead they are made to draft."""
    token_map_size: int | None = None
    """V': tokens that they can draft; None for all."""

    fused_layers: ClassVar[tuple[int, ...]] = ()
    """They read only the base's last states."""

    def __post_init__(self) -> None:
        check_counts(self, MAX_SIZE, "hidden_size", "vocab_size")
        check_counts(self, MAX_DEPTH, "max_depth")
        if self.token_map_size is not None:
            check_counts(self, self.vocab_size, "token_map_size")
        try:
            base = AutoConfig.for_model(**self.base_config)
            counts = base.num_hidden_layers, num_mtp_layers(base)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"base_config must be a configuration of transformers: {error}") from error
        if not all(is_count(count, MAX_LAYERS) for count in counts):
            raise ValueError(f"base_config must say layers, 1 to {MAX_LAYERS} of either kind, got {counts}")

    @classmethod
    def of_base(cls, base: CausalLM, max_depth: int | None = None, **options: Any) -> Self:
        """The layers that come with ``base``, drafting as deep as they are many, or ``max_depth``.

        Raises:
            ValueError: it has none, or they need other masks than full attention.
        """
        missing = mtp_unsupported_reason(base)
        if missing:
            raise ValueError(f"multi-token prediction needs {missing}")
        text = copy.deepcopy(base.config.get_text_config(decoder=True))
        text.num_mtp_layers = num_layers = num_mtp_layers(text)
        for name in ("layer_types", "mlp_layer_types"):  # one for each layer, where the base says any
            kinds = getattr(text, name, None)
            if kinds and getattr(text, f"mtp_{name}", None) is None:
                kind = "full_attention" if name == "layer_types" else kinds[-1]
                setattr(text, f"mtp_{name}", [kind] * num_layers)
        others = set(getattr(text, "mtp_layer_types", None) or ()) - {"full_attention"}
        if others:
            raise ValueError(
                f"the layers for multi-token prediction of {type(base).__name__} are of kind "
                f"{', '.join(sorted(others))}, and medusa runs only full attention; train heads for it"
            )
        return cls(
            hidden_size=hidden_size(base),
            vocab_size=vocab_size(base),
            base_config=text.to_diff_dict(),
            max_depth=max_depth or num_layers,
            **options,
        )


class MtpHead(AutoregressiveHead):
    """The layers, without the base's embeddings."""

    kind: ClassVar[str] = "mtp"
    config_type: ClassVar[type[Any]] = MtpConfig

    def __init__(self, config: MtpConfig, token_map: Sequence[int] | Tensor | None = None):
        super().__init__(config, token_map)
        modules = _modules()
        if modules is None:
            raise ValueError(f"heads of kind {self.kind!r} need {_NEEDED}")
        base = without_weights(config.base_config)
        self.layers = modules(base, base.config.num_mtp_layers).layers
        self._cache_argument = cache_argument(self.layers[0])
        with torch.device("cpu"):  # no file holds its frequencies: a head built on "meta" needs real ones too
            self.rotary_emb = type(base.get_decoder().rotary_emb)(base.config)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def in_words(self) -> str:
        layers = counted(self.num_layers, "layer")
        return f"{layers} for multi-token prediction, drafting {self.num_heads} deep"

    def initialise(self, base: CausalLM) -> None:
        """Begin as the layers in the files of ``base`` are."""
        self.copy_weights(own_head(base))

    def forward(
        self,
        features: Tensor,
        next_embeddings: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        layer: int = 0,
    ) -> Drafted:
        module: Any = self.layers[layer]
        if position_ids is None:
            position_ids = torch.arange(features.shape[1], device=features.device)[None]
        position_ids = position_ids + 1  # the position of the joined token
        dtype = module.eh_proj.weight.dtype
        features = features.to(dtype)
        states = module(
            next_embeddings.to(dtype),
            features,
            position_embeddings=self.rotary_emb(features, position_ids),
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{self._cache_argument: cache},
        )
        return Drafted(states, states)


def empty_own_head(base: CausalLM, max_depth: int | None = None, token_map: Tensor | None = None) -> MtpHead:
    """The base's own layers without memory for their weights; they draft the tokens ``token_map`` (V',) long,
    or all.

    Raises:
        ValueError: as :meth:`MtpConfig.of_base`.
    """
    size = None if token_map is None else len(token_map)
    config = MtpConfig.of_base(base, max_depth, token_map_size=size)
    with torch.device("meta"):
        head = MtpHead(config)
    head.token_map = token_map
    return head


def own_head(
    base: CausalLM,
    max_depth: int | None = None,
    *,
    token_map: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> MtpHead:
    """The base's own layers, in its type or in ``dtype``, with the weights of the files that it was loaded
    from.

    Raises:
        ValueError: as :func:`empty_own_head`, or the files do not hold the weights.
    """
    head = empty_own_head(base, max_depth, token_map)
    dtype = dtype or base.dtype
    files_base = without_weights(head.config.base_config)  # says to transformers what to read, and where
    path = gguf_path(base.name_or_path, {})
    if path is not None:
        gguf_model().fill_mtp_layers(GGUFFile.open(path), files_base, head.layers, dtype)
        return head
    files_base.config.name_or_path = base.name_or_path
    files_base.config.dtype = dtype
    # transformers knows the numbers of these layers for some bases only
    first = files_base.config.num_hidden_layers
    known = files_base._keys_to_ignore_on_load_unexpected or ()
    numbered = [rf"(^|\.)layers\.{number}\." for number in range(first, first + head.num_layers)]
    files_base._keys_to_ignore_on_load_unexpected = [*known, *numbered]
    try:
        mtp_model = _modules().from_pretrained(files_base)
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"the files of {files_base.config.name_or_path!r} do not hold the layers for multi-token "
            f"prediction that the configuration speaks of; train heads for this base: {error}"
        ) from error
    head.layers.load_state_dict(mtp_model.layers.state_dict(), assign=True)
    return head


def without_weights(config: Mapping[str, Any]) -> Any:
    """A model of the configuration without memory for its weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="sdpa")
