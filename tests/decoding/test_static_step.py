"""A static step asks its device for nothing, and traces in one piece that serves every length."""

from __future__ import annotations

import pytest
import torch
from conftest import ARCHITECTURES, VOCAB_SIZE, random_prompts
from host_traffic import HostTraffic
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from medusa import CandidateTree, HeadsConfig, MedusaHeads
from medusa.base.causal_lm import home_device, new_cache, output_embedding, seen_hidden
from medusa.decoding.forward import Forward
from medusa.decoding.state import DecodeRequest, DecodeState, Prefix
from medusa.decoding.static import StaticState, static_step
from medusa.decoding.step import begin
from medusa.drafters.dynamic import DynamicHeadsDrafter
from medusa.drafters.heads import HeadsDrafter
from medusa.drafters.protocol import PlainDrafter
from medusa.drafters.registry import united
from medusa.drafters.suffix import SuffixDrafter

TREE = CandidateTree.from_paths([(), (0,), (1,), (0, 0), (1, 2), (1, 2, 0)])
CARD = "meta"
KINDS = [
    "plain",
    "heads",
    "heads that read their path",
    "heads with a token map",
    "both",
    "dynamic",
    "suffix",
    "heads+suffix",
    "dynamic+suffix",
]


def drafter_of(kind: str, base, map_is_loaded: bool = True):
    """A drafter of random heads, or none; tensors without data have no map to check."""
    if kind == "plain":
        return PlainDrafter()
    if kind == "suffix":
        return SuffixDrafter(4)
    if kind.endswith("+suffix"):
        return united([drafter_of(kind.removesuffix("+suffix"), base, map_is_loaded), SuffixDrafter(5)])
    ids = list(range(3, 40)) if kind in ("heads with a token map", "both", "dynamic") else None
    config = HeadsConfig(
        32,
        VOCAB_SIZE,
        num_heads=3,
        unembedding="token_map" if ids else "shared",
        token_map_size=len(ids) if ids else None,
        reads_path=kind in ("heads that read their path", "both", "dynamic"),
        fused_layers=(1, 2) if kind == "both" else (),
    )
    heads = MedusaHeads(config, token_map=ids if map_is_loaded else None)
    drafter_type = DynamicHeadsDrafter if kind == "dynamic" else HeadsDrafter
    return drafter_type(heads.eval(), output_embedding(base), TREE)


def sampling(num_rows: int, device="cpu") -> dict:
    warpers = [hf.TemperatureLogitsWarper(0.9), hf.TopKLogitsWarper(20), hf.TopPLogitsWarper(0.9)]
    return {
        "seeds": torch.arange(num_rows, device=device),
        "temperature": 0.9,
        "processors": LogitsProcessorList([*warpers, hf.MinPLogitsWarper(0.01)]),
    }


def prefilled(base, drafter, lengths: list[int], **kwargs) -> StaticState:
    """The state after the prompts, with room for 256 tokens."""
    prompts = random_prompts(len(lengths), max(lengths))
    request = DecodeRequest(prompts, torch.tensor(lengths), 30, **kwargs)
    drafter.begin(len(lengths))
    forward = Forward(base, drafter.reads_layers)
    rows, _ = begin(forward, request, Prefix(new_cache(base, len(lengths))))
    state = StaticState.like(rows, num_steps=4)
    state.reserve(256)
    state.load(rows, num_left=29)
    return state


def on_a_card(base, drafter, device: str) -> StaticState:
    """Two rows on a graphics card that is only pretended, inside a FakeTensorMode."""
    config, lengths = base.config, torch.tensor([9, 4]).to(device)
    cache = new_cache(base, 2)
    cache.lengths = lengths - 1
    for layer in cache.tree_layers:
        empty = torch.empty(2, config.num_key_value_heads, 0, config.head_dim, device=device)
        layer.lazy_initialization(empty, empty)
    request = DecodeRequest(
        lengths.new_zeros(2, 9), lengths, 30, eos_ids=frozenset({3}), **sampling(2, device)
    )
    hidden = torch.empty(2, (1 + len(drafter.reads_layers)) * config.hidden_size, device=device)
    rows = DecodeState([0, 1], request.tokens, lengths, hidden, cache, [request] * 2, request.seeds)
    state = StaticState.like(rows, num_steps=4)
    state.reserve(256)
    state.load(rows, num_left=29)
    return state


def pretended() -> FakeTensorMode:
    """Tensors without data, so that a second device can be pretended: CARD."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_step_moves_nothing_between_host_and_device(kind):
    """Such traffic waits for the device, and a CUDA graph cannot hold it."""
    with pretended():
        with torch.device(CARD):
            base = ARCHITECTURES["llama"]()
            drafter = drafter_of(kind, base, map_is_loaded=False)
        drafter.begin(2)
        state = on_a_card(base, drafter, CARD)
        with seen_hidden(base, layers=drafter.reads_layers) as seen, HostTraffic(CARD) as traffic:
            for _ in range(2):
                static_step(base, drafter, state, seen)
        assert not traffic.found
        assert {state.rows.tokens.device.type, state.finished.device.type} == {CARD}


def test_such_traffic_would_be_seen():
    with pretended(), HostTraffic(CARD) as traffic:
        there = torch.zeros(3, device=CARD)
        there + 1
        assert not traffic.found
        there + torch.tensor([1, 2, 3]).to(CARD)
        assert len(traffic.found) > 0
        with pytest.raises(DataDependentOutputException):
            there.sum().item()


@pytest.mark.parametrize("last", ["cpu", CARD])
@pytest.mark.parametrize("kind", ["plain", "heads", "both"])
@torch.no_grad()
def test_a_step_runs_on_a_model_sharded_over_devices(kind, last):
    """accelerate's hooks move what passes between layers; what stands around the model has to follow.

    The output embedding is on ``last``: with the last layers, or, as tied ones are, with the first.
    """
    hooks = pytest.importorskip("accelerate.hooks")
    with pretended():
        parts = {}
        for device in ("cpu", CARD):
            with torch.device(device):
                parts[device] = ARCHITECTURES["llama"]()
        base, other = parts["cpu"], parts[CARD]
        base.model.layers[1], base.model.norm = other.model.layers[1], other.model.norm
        base.lm_head = parts[last].lm_head
        places = {base.model.layers[1]: CARD, base.model.norm: CARD, base.lm_head: last}
        places |= dict.fromkeys((base.model.embed_tokens, base.model.rotary_emb, base.model.layers[0]), "cpu")
        for module, device in places.items():
            hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device=device))
        hooks.add_hook_to_module(base, hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True))
        assert home_device(base) == torch.device(last)
        with torch.device(last):
            drafter = drafter_of(kind, base, map_is_loaded=False)
        drafter.begin(2)
        state = on_a_card(base, drafter, last)
        for layer, device in zip(state.cache.tree_layers, ("cpu", CARD), strict=True):
            layer.hold([entries.to(device) for entries in layer.entries])
        with seen_hidden(base, layers=drafter.reads_layers) as seen:
            for _ in range(2):
                static_step(base, drafter, state, seen)
