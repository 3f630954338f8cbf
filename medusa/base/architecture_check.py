"""Checks whether trees can be verified on a base model: rules, and a trial for everything else.

The trial runs a small tree below two short prompts and compares the logits of every node with the model's own
forward over the same tokens, without a cache. About 150 tokens are read in all.

Quantised layers are tried too, one of each kind: the libraries bring layers of their own, whose arithmetic is
nowhere declared. Two things matter to draft tokens, which share a pass:

- **Other rows.** LLM.int8 of bitsandbytes multiplies those columns in full precision in which any row of the
  pass has a large number, and layers with one scale for all activations round by the largest row. There the
  guesses are part of the result, in any precision.
- **Less than float32.** Layers that round their input, or compute in bfloat16, make a difference in the last
  bits large. A base loaded in float32 is then only as exact as one in bfloat16.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from medusa.base.attention import attention_windows, check_attention, is_code_of_transformers
from medusa.base.causal_lm import CausalLM, copy_sharing_parameters, lm_head, lm_head_device, vocab_size
from medusa.base.passes import cache_argument, cache_of, new_cache, prefill, takes_cache, verify, with_rules
from medusa.base.profile import context_length
from medusa.base.recurrent import is_recurrent
from medusa.base.recurrent_rules import check_states
from medusa.trees.candidate_tree import CandidateTree, TreeTopology

TESTED_MODEL_TYPES = frozenset(
    {
        "bailing_hybrid", "bamba", "cohere2", "deepseek_v3", "falcon", "falcon_h1", "falcon_mamba", "gemma",
        "gemma2", "gemma3_text", "gemma4_text", "glm4", "gpt2", "gpt_neox", "gpt_oss", "granite",
        "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "llama", "mamba", "mamba2",
        "mistral", "mixtral", "nemotron_h", "olmo2", "olmo_hybrid", "opt", "phi", "phi3", "qwen2", "qwen2_vl",
        "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl", "smollm3",
        "starcoder2", "zamba", "zamba2", "zaya",
    }
)  # fmt: skip
"""``config.model_type`` of the architectures that our tests hold to ``transformers``' own ``generate``."""

PROMPT_LENGTHS = (13, 8)
CHUNK = 5
"""Tokens of a chunk of the chunked prefill: neither prompt is a whole number of chunks."""
TRIAL_WINDOW = 4
"""Longer sliding windows are shortened to this for the trial, so that short prompts cross them."""
TREE = CandidateTree.from_paths([(0,), (1,), (0, 0), (1, 0), (0, 0, 0), (1, 0, 0)])
BRANCHES = ((0, 1, 3, 5), (0, 2, 4, 6))
"""Its nodes from the root to either leaf. The second branch is committed, so its cache entries move."""
NUM_TRIALS = 3
"""Number of random prompts on which a difference must appear: in low precision a mixture of experts may
choose other experts just by rounding."""


@dataclass(frozen=True)
class Tolerance:
    """Largest difference of two logits that counts as rounding, as a fraction of the range of all logits."""

    always: float
    """Up to here nothing more is measured."""
    never: float
    """Beyond this, however far the model's own decoding with a cache is from its plain forward; below, up to
    :data:`NOISE_FACTOR` times that distance."""


FULL_PRECISION = Tolerance(always=2e-4, never=1e-2)
LOW_PRECISION = Tolerance(always=2e-2, never=0.2)
NOISE_FACTOR = 4


@dataclass(frozen=True)
class Comparison:
    """The logits of one place as the tree pass and as the model's own forward computed them."""

    place: str
    difference: float
    """The largest difference of two logits."""
    tolerance: float

    @property
    def agrees(self) -> bool:
        return self.difference <= self.tolerance


def check_base(base: CausalLM) -> None:
    """:func:`check_decodable`, :func:`check_quantised_layers`, and
    :func:`check_tree_verification` where our tests do not know the model.

    Raises:
        ValueError: a tree cannot be verified on ``base``, with the reason or the numbers.
    """
    check_decodable(base)
    check_quantised_layers(base)
    if not is_tested(base):
        check_tree_verification(base)


def is_tested(base: CausalLM) -> bool:
    """Whether our tests cover this architecture, in ``transformers``' own code."""
    is_known_code = is_code_of_transformers(base) and is_code_of_transformers(base.get_decoder())
    return is_known_code and base.config.model_type in TESTED_MODEL_TYPES


def check_tree_verification(base: CausalLM) -> None:
    """Run the trial on ``base``, which is left as it is.

    Raises:
        ValueError: the tree's logits differ from the model's own forward, or a pass fails.
    """
    fault = verification_error(base)
    if fault is not None:
        raise ValueError(f"{fault}; use its own generate")


def verification_error(base: CausalLM) -> str | None:
    """The reason why trees cannot be verified on ``base``, found by the trial; None if they can."""
    name = type(base).__name__
    try:
        worst = worst_comparison(base)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return (
            f"{name} (model_type {base.config.model_type!r}) fails on a tree of draft tokens, so medusa "
            f"cannot decode with it ({type(error).__name__}: {error})"
        )
    if worst.agrees:
        return None
    return (
        f"{name} (model_type {base.config.model_type!r}) gives a tree of draft tokens other logits than "
        f"the same tokens in a row: at {worst.place} they differ by {worst.difference:.3g}, and rounding "
        f"explains {worst.tolerance:.3g} at most. Medusa would change its text"
    )


@torch.no_grad()
def worst_comparison(base: CausalLM) -> Comparison:
    """The place where a tree pass is furthest from the model's own forward, in the best of the trials."""
    view = _trial_view(base)
    for seed in range(NUM_TRIALS):
        worst = _trial(view, seed)
        if worst.agrees:
            break
    return worst


def _trial(base: CausalLM, seed: int) -> Comparison:
    """The place where a tree pass over random tokens is furthest from the model's own forward."""
    room = (context_length(base) or sys.maxsize) - TREE.depth - 2
    lengths = [max(1, min(length, room)) for length in PROMPT_LENGTHS]
    generator = torch.Generator().manual_seed(seed)
    usable = _usable_tokens(base)
    width = max(lengths)
    draws = torch.rand(len(lengths), width + TREE.num_nodes + 1, generator=generator)
    tokens = usable[(draws * len(usable)).long()].to(lm_head_device(base))
    prompts, nodes, after = tokens.split([width, TREE.num_nodes, 1], dim=1)
    rows = []  # per prompt (2, length + 5): the tokens along either branch
    for row, length in enumerate(lengths):
        along_branches = [
            _joined_along(branch, prompts[row, :length], nodes[row], after[row]) for branch in BRANCHES
        ]
        rows.append(torch.stack(along_branches))
    expected = [_own_logits(base, row) for row in rows]
    span = max(_span(logits) for logits in expected)
    tolerance = _tolerance(base)
    differences = list(_compared(base, lengths, prompts, nodes, after, expected))
    place, difference = max(differences, key=lambda pair: pair[1])
    allowed = tolerance.always * span
    if allowed < difference <= tolerance.never * span:  # the model's own decoding may be as far off
        noise = _difference(_own_cached_logits(base, rows[0]), expected[0])
        allowed = max(allowed, min(NOISE_FACTOR * noise, tolerance.never * span))
    return Comparison(place, difference, allowed)


def _joined_along(branch: tuple[int, ...], prompt: Tensor, nodes: Tensor, after: Tensor) -> Tensor:
    """A prompt (T,), the nodes of a branch and the token after it: (T + 5,)."""
    return torch.cat([prompt, nodes[list(branch)], after])


def _span(logits: Tensor) -> float:
    """The range of logits, without values that represent minus infinity."""
    finite = logits[logits.abs() < torch.finfo(logits.dtype).max / 2]
    return float(finite.max() - finite.min()) if len(finite) else 0.0


def _compared(
    base: CausalLM,
    prompt_lengths: list[int],
    prompts: Tensor,
    nodes: Tensor,
    after: Tensor,
    expected: list[Tensor],
) -> Iterator[tuple[str, float]]:
    """Every node of the trial, and the distance of its logits from ``expected``."""
    base = with_rules(base)
    lengths = torch.tensor(prompt_lengths, device=prompts.device)
    for chunk, reading in _readings(prompt_lengths):
        cache = new_cache(base, len(lengths))
        _, last = prefill(base, prompts, lengths, cache, chunk=chunk)
        _, logits = verify(base, nodes, TREE.topology(prompts.device), cache)
        path = torch.tensor(BRANCHES[1], device=prompts.device).expand(len(lengths), -1)
        cache.commit(path, torch.full_like(lengths, path.shape[1]))
        _, final = verify(base, after, TreeTopology.chain(1, prompts.device), cache)
        for row, length in enumerate(prompt_lengths):
            where = f"of a prompt of {length} tokens {reading}"
            yield f"the last token {where}", _difference(last[row], expected[row][0, length - 1])
            for branch, along in zip(BRANCHES, expected[row], strict=True):
                for depth, node in enumerate(branch):
                    place = f"tree node {node} (depth {depth}) {where}"
                    yield place, _difference(logits[row, node], along[length + depth])
            place = f"the token after a committed branch {where}"
            yield place, _difference(final[row, 0], expected[row][1, -1])


def _readings(prompt_lengths: list[int]) -> tuple[tuple[int, str], ...]:
    """Tokens of a chunk in which prompts are read, and the same in words."""
    return (max(prompt_lengths), "read whole"), (CHUNK, f"read in chunks of {CHUNK} tokens")


def _own_logits(base: CausalLM, rows: Tensor) -> Tensor:
    """Logits (B, T, V) of the model's own forward over rows (B, T) long, without a cache."""
    extra = {"token_type_ids": torch.zeros_like(rows)} if _has_token_types(base) else {}
    return base(input_ids=rows, use_cache=False, **extra).logits


def _own_cached_logits(base: CausalLM, rows: Tensor) -> Tensor:
    """The logits of :func:`_own_logits` from the model's own cache, the last tokens one at a time."""
    start = rows.shape[1] - TREE.depth - 2
    output = base(input_ids=rows[:, :start], use_cache=True)
    parts = [output.logits]
    for column in range(start, rows.shape[1]):
        cache = {cache_argument(base): cache_of(output)}
        output = base(input_ids=rows[:, column : column + 1], use_cache=True, **cache)
        parts.append(output.logits)
    return torch.cat(parts, dim=1)


def _has_token_types(base: CausalLM) -> bool:
    """Whether the model's processor marks the tokens of a text prompt with zeros, which then may mean much:
    PaliGemma attends to them in both directions."""
    is_composite = base.config.get_text_config(decoder=True) is not base.config
    return is_composite and "token_type_ids" in inspect.signature(base.forward).parameters


def _difference(logits: Tensor, expected: Tensor) -> float:
    """The largest difference: 0 where both are infinite or not a number, infinite where only one is."""
    expected = expected.to(logits.device)
    is_same = (logits == expected) | (logits.isnan() & expected.isnan())
    differences = torch.where(is_same, 0.0, (logits.float() - expected.float()).abs())
    return float(differences.nan_to_num(nan=torch.inf).max())


def _tolerance(base: CausalLM) -> Tolerance:
    """The tolerance of the precision in which ``base`` computes."""
    is_full = base.dtype in (torch.float32, torch.float64) and not getattr(base, "is_quantized", False)
    return FULL_PRECISION if is_full else LOW_PRECISION


def _usable_tokens(base: CausalLM) -> Tensor:
    """Token ids of text: (V',) long, without the special tokens of the configuration."""
    special: set[int] = set()
    for config in (base.config, base.config.get_text_config(decoder=True)):
        for key, value in config.to_dict().items():
            if key.endswith(("token_id", "token_index", "token_ids")):
                ids = value if isinstance(value, list) else [value]
                special.update(token for token in ids if isinstance(token, int))
    return torch.tensor([token for token in range(vocab_size(base)) if token not in special])


def _trial_view(base: CausalLM) -> CausalLM:
    """Modules of our own over the weights of ``base``, with short sliding windows."""
    view = copy_sharing_parameters(base).eval()
    for module in view.modules():
        for holder in (module, getattr(module, "config", module)):
            window = getattr(holder, "sliding_window", None)
            if isinstance(window, int) and window > TRIAL_WINDOW:
                holder.sliding_window = TRIAL_WINDOW
    return view


def check_is_model(base: object) -> None:
    """Raise TypeError, saying what to pass instead, unless ``base`` is a model of ``transformers`` itself."""
    if isinstance(base, PreTrainedModel):
        return
    kind = type(base).__name__
    if hasattr(base, "_orig_mod"):
        advice = "pass the model that was compiled (its _orig_mod), and step='compiled' for compiled steps"
    elif hasattr(base, "get_base_model"):
        if getattr(getattr(base, "active_peft_config", None), "is_prompt_learning", False):
            advice = (
                "its tuned prompt is outside of the model's layers, and get_base_model() would lose it; "
                "train an adapter of the layers, such as LoRA"
            )
        else:
            advice = "pass its get_base_model(), which keeps the adapter"
    elif isinstance(getattr(base, "module", None), PreTrainedModel):
        advice = "pass the model inside (its module)"
    else:
        advice = "load one with AutoModelForCausalLM.from_pretrained"
    raise TypeError(f"base must be a path, a hub id or a loaded PreTrainedModel, got {kind}; {advice}")


def check_decodable(base: CausalLM, attends_here: bool = True) -> None:
    """Raise ValueError, with the reason, when a tree cannot be verified on ``base``, TypeError when ``base``
    is a wrapper around a model. The attention implementation counts only where ``attends_here``."""
    check_is_model(base)
    name = type(base).__name__
    config = base.config.get_text_config(decoder=True)
    if base.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder model; tree verification needs a decoder-only model")
    lm_head(base)
    if not base.can_generate():
        raise ValueError(f"{name} cannot generate: it is no causal language model; use AutoModelForCausalLM")
    if is_recurrent(base):
        check_states(base)
        return
    parameters = inspect.signature(type(base).forward).parameters
    if not takes_cache(base) and is_code_of_transformers(base):
        raise ValueError(
            f"{name}.forward takes no cache of transformers, so it keeps no keys and values of a prompt; "
            "tree verification needs a model with a key-value cache"
        )
    if "position_ids" not in parameters:
        raise ValueError(
            f"{name}.forward takes no position_ids (it derives positions from the order of tokens), "
            "so the nodes of a tree cannot be given theirs"
        )
    if attends_here:
        check_attention(base)
    if getattr(config, "alibi", False):
        raise ValueError(
            f"{name} biases attention by distance (alibi=True) and takes the distance from the order of "
            "tokens, so the nodes of a tree cannot be given theirs"
        )
    if getattr(config, "cross_attention_layers", None):
        raise ValueError(
            f"{name} has layers that attend to images (cross_attention_layers), and a tree is verified from "
            "only its tokens; use its own generate"
        )
    attention_windows(base)


# ------------------------------------------------------------------ quantised layers

NUM_INPUTS = 2**17
"""Numbers of a trial: rounding shows in a few of them. At least :data:`MIN_ROWS` rows."""
MIN_ROWS = 64
LARGE = 20.0
"""By how much the other rows are larger: some of their numbers count as outliers then."""
NOISE = 2.0**-17
"""A change of the input that float32 arithmetic hands on as it is, in parts of each number."""
HANDED_ON = 8 * NOISE
"""Largest allowed deviation, relative to the largest result; rounding to bfloat16 gives thirty times as
much."""


def check_quantised_layers(base: CausalLM) -> None:
    """Warn where a float32 ``base`` has quantised layers that compute in less.

    Raises:
        ValueError: the output of a quantised layer for a token depends on the other tokens of the pass.
    """
    rounding = []
    for name, layer in _one_of_each_kind(base):
        depends, rounds = _flaws(layer, base)
        if depends:
            raise ValueError(
                f"what {_kind_name(layer)} ({name}) gives for a token depends on the tokens beside it, so "
                "guesses would change the text; load the base with weights quantised otherwise, in 4 bits or "
                "with torchao's Int8WeightOnlyConfig say, or use its own generate"
            )
        if rounds:
            rounding.append(_kind_name(layer))
    if rounding:
        warnings.warn(
            f"{' and '.join(dict.fromkeys(rounding))} compute in less than float32, in which this base is "
            "loaded: as in half precision, guesses may decide between two tokens that are nearly equally "
            "likely",
            stacklevel=4,
        )


def _one_of_each_kind(base: CausalLM) -> Iterator[tuple[str, Any]]:
    """The first linear layer of each kind and shape whose weights are quantised, and its name."""
    seen = set()
    for name, layer in base.named_modules():
        if not _is_linear(layer) or any(_is_linear(child) for child in layer.children()):
            continue  # adapters wrap the layer that counts
        weight = getattr(layer, "weight", None)
        is_plain = type(weight) is nn.Parameter and weight.dtype.is_floating_point and weight.itemsize > 1
        kind = (type(layer), type(weight), layer.in_features, layer.out_features)
        if not is_plain and kind not in seen:
            seen.add(kind)
            yield name, layer


def _is_linear(layer: nn.Module) -> bool:
    return all(isinstance(getattr(layer, name, None), int) for name in ("in_features", "out_features"))


def _kind_name(layer: nn.Module) -> str:
    """The kind of a quantised layer, in words."""
    if type(layer) is nn.Linear:  # torchao replaces only the weight
        return f"layers with {type(layer.weight).__name__} weights"
    library = type(layer).__module__.partition(".")[0]
    return f"{type(layer).__name__} layers of {library}"


@torch.no_grad()
def _flaws(layer: Any, base: CausalLM) -> tuple[bool, bool]:
    """Whether what ``layer`` gives for a row depends on the others of a pass, and whether it computes in less
    than float32 though ``base`` is loaded so."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, max(MIN_ROWS, NUM_INPUTS // layer.in_features), layer.in_features)
    tensors = chain(layer.parameters(), layer.buffers())
    device = next((tensor.device for tensor in tensors), lm_head_device(base))
    if device.type == "meta":  # accelerate loads the weights on demand
        device = lm_head_device(base)

    def drawn() -> Tensor:
        return torch.randn(shape, generator=generator)

    def output_of(states: Tensor) -> Tensor:
        return layer(states.to(device, base.dtype)).float()

    rows = drawn()
    others = drawn() * LARGE
    others[:, 0] = rows[:, 0]
    noise = drawn().sign() * NOISE
    output = output_of(rows)
    depends = not torch.equal(output[:, 0], output_of(others)[:, 0])
    if base.dtype != torch.float32:
        return depends, False
    change = (output_of(rows + rows * noise) - output).abs().max()
    return depends, bool(change > HANDED_ON * output.abs().max())
