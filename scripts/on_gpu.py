"""Measurements on a graphics card: one process, a JSON line for each answer, the most valuable first.

    python scripts/on_gpu.py > answers.jsonl                # as much as nine minutes hold
    python scripts/on_gpu.py --only exact steps             # the questions whose names begin so
    python scripts/on_gpu.py --dry-run                      # all of them, tiny, on a CPU

It wants this checkout, torch and transformers; no base, no network and nothing else that has to be installed.
Nothing is written to disk. A failure is an answer too, with its error, and the exit status is then 1, as for
a text that is not exact.

versions    what runs, and which attention torch likes best
noise       whether the noise that chooses tokens is that of the CPU, bit for bit
exact       whether every kind of step and drafter gives the text of plain decoding, in float32
            ("exact beside others": whether requests that join and leave a batch get the text of each alone)
same        how much of it they give in bfloat16, where a pass over several nodes rounds otherwise
steps       of models of 8B and 0.5B shape: milliseconds of a step by kind of step and nodes, and memory
batch       the same by kind of step and rows that share it, as requests of a server do
clients     of a batch that 1, 4 and 16 clients keep asking: tokens a second, and the wait for the first token
kernels     where the time of a captured step goes
attention   the first call at a new length and those that follow, by backend, nodes and length
packed      the kernels in Triton that engine="packed" asks for: each beside torch's operators, the text, a
            step with them and without, products with a file's own bits, and an 8B file that keeps them
theirs      milliseconds a token of transformers, as it is and compiled over its static cache
training    tokens a second: the states of the base alone, and heads trained on them
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import medusa
from medusa import CandidateTree, DecodingStatistics, HeadsConfig, MedusaHeads, MedusaModel
from medusa.acceptance.sampling import gumbel_noise, hashed_bits
from medusa.base.passes import cache_argument, hidden_states
from medusa.decoding.batch import BatchLimits, Row
from medusa.engine.card.support import fused_on_card, triton_unsupported_reason
from medusa.hardware import device_name, wait_for

Answer = Any
Question = tuple[str, Callable[[], Answer]]
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
TINY = dict(zip(SIZES, (64, 128, 2, 4), strict=True)) | {"num_key_value_heads": 2, "vocab_size": 300}
SHAPES: dict[str, dict[str, Any]] = {
    "8B": dict(zip(SIZES, (4096, 14336, 32, 32), strict=True))
    | {"num_key_value_heads": 8, "vocab_size": 128256},
    "1.5B": dict(zip(SIZES, (1536, 8960, 28, 12), strict=True))
    | {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "0.5B": dict(zip(SIZES, (896, 4864, 24, 14), strict=True))
    | {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
}
"""Of Llama 3.1 8B, and of Qwen2.5 1.5B and 0.5B."""
BLOCKS = {"Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "Q8_0": 8, "Q4_0": 2}
"""Types of a file's matrices, as GGUF numbers them."""
RULES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.9, "top_k": 20, "seed": 3},
}
DRAFTERS = ("plain", "heads", "dynamic-heads+suffix")
WITH_WORDS = ("exact", "exact beside others", "same", "steps", "batch", "clients", "kernels", "attention")
"""Questions that say behind a colon what is asked."""
NUM_ROWS = (1, 4, 16)
"""Requests that decode together."""


class Card:
    """The device, and the sizes of the measurements: tiny in a dry run without a card."""

    def __init__(self, device: str, is_tiny: bool):
        self.device, self.is_tiny = torch.device(device), is_tiny
        is_card = self.device.type == "cuda"
        self.steps = ("general", "static", "captured") if is_card else ("general", "static")
        self._large: dict[str, Any] = {}
        self.last: Any = None
        """The model whose steps were timed last."""

    def base(self, dtype: torch.dtype, sizes: dict[str, Any]) -> Any:
        """A random base."""
        torch.manual_seed(0)
        config = LlamaConfig(**sizes, max_position_embeddings=8192, eos_token_id=None, pad_token_id=0)
        with torch.device(self.device):
            return LlamaForCausalLM._from_config(config, dtype=dtype).eval()

    def large(self, shape: str = "8B") -> Any:
        """The base of that shape in bfloat16, made once."""
        if shape not in self._large:
            self._large[shape] = self.base(torch.bfloat16, TINY if self.is_tiny else SHAPES[shape])
        return self._large[shape]

    def prompt(self, num_rows: int, length: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randint(3, 300, (num_rows, length), generator=generator).to(self.device)

    def milliseconds(self, work: Callable[[], Any], runs: int = 20) -> dict[str, float]:
        """Seconds of the first call, and the median of later ones."""
        taken = []
        for _ in range(4 + (1 if self.is_tiny else runs)):
            wait_for(self.device)
            began = time.perf_counter()
            work()
            wait_for(self.device)
            taken.append(1e3 * (time.perf_counter() - began))
        return {"first": taken[0], "median": statistics.median(taken[4:])}


def bushy(num_nodes: int) -> CandidateTree:
    """Four ranks below each node, breadth first, at most four deep."""
    paths: list[tuple[int, ...]] = [()]
    for path in paths:
        children = [(*path, rank) for rank in range(4)] if len(path) < 4 else []
        paths += children[: num_nodes - len(paths)]
    return CandidateTree.from_paths(paths)


def questions(card: Card) -> Iterator[Question]:
    """All of them, the most valuable first."""
    yield "versions", lambda: versions(card)
    yield "noise", lambda: noise(card)
    for step, drafter, rule in product(card.steps, DRAFTERS, RULES):
        yield f"exact: {step}, {drafter}, {rule}", lambda *given: agreement(card, torch.float32, *given)
    fast = card.steps[-1]
    for num_rows, rule in product(NUM_ROWS, RULES):
        yield (
            f"exact beside others: {fast}, {num_rows} rows, {rule}",
            lambda *given: shared_agreement(card, *given),
        )
    for step, drafter in product(card.steps, DRAFTERS):
        yield f"same: {step}, {drafter}, greedy", lambda *given: agreement(card, torch.bfloat16, *given)
    yield from packed_questions(card)
    for shape in SHAPES:
        for nodes, step in product((1, 64, 8), reversed(card.steps)):
            yield f"steps: {shape}, {step}, {nodes} nodes", lambda *given: seconds_of_steps(card, *given)
            if step == "captured" and nodes != 8:
                yield f"kernels: {shape}, {nodes} nodes", lambda *_: kernels(card)
        name = f"steps: {shape}, {fast}, 64 nodes, dynamic-heads+suffix"
        yield name, lambda *given: seconds_of_steps(card, *given)
    for shape, num_rows, step in product(SHAPES, NUM_ROWS, (fast, "general")):
        yield f"batch: {shape}, {step}, {num_rows} rows", lambda *given: seconds_of_rows(card, *given)
    for num_clients, step in product(NUM_ROWS, (fast, "general")):
        yield f"clients: 8B, {step}, {num_clients} clients", lambda *given: clients(card, *given)
    for is_cudnn, nodes, length in product((True, False), (1, 8, 64), (513, 514, 4096)):
        name = f"attention: {'with' if is_cudnn else 'without'} cuDNN, {nodes} nodes, {length} keys"
        yield name, lambda *given: attention(card, *given)
    yield "theirs: as it is", lambda: theirs(card)
    if card.device.type == "cuda" and not card.is_tiny:
        yield "theirs: compiled, static cache", lambda: theirs_compiled(card)
    yield "training", lambda: training(card)


def packed_questions(card: Card) -> Iterator[Question]:
    """Those about the kernels in Triton. Where they do not run, the one answer is why."""
    lacks = triton_unsupported_reason(card.device)
    if lacks is not None:
        yield "packed: all", lambda: {"left out": lacks}
        return
    for name, dtype in product(("rows", "angles", "attention", "gate"), ("float32", "bfloat16")):
        if not card.is_tiny or dtype == "float32":  # Triton's interpreter knows no bfloat16
            yield f"packed kernel: {name}, {dtype}", lambda *given: packed_kernel(card, *given)
    for step, drafter in product(card.steps, ("plain", "heads") if card.is_tiny else DRAFTERS):
        yield f"packed exact: {step}, {drafter}", lambda *given: packed_agreement(card, *given)
    sizes = [("8B", 8)] if card.is_tiny else product(("8B", "1.5B"), (1, 8, 64))
    for shape, nodes in sizes:
        for engine in ("eager", "packed"):
            name = f"packed steps: {shape}, {card.steps[-1]}, {nodes} nodes, {engine}"
            yield name, lambda *given: packed_steps(card, *given)
            if engine == "packed" and card.steps[-1] == "captured" and not card.is_tiny:
                yield f"packed shares: {shape}, {nodes} nodes", lambda *_: kernels(card)
    for kind, rows in product(BLOCKS, (1,) if card.is_tiny else (1, 16, 64)):
        yield f"packed product: {kind}, {rows} rows", lambda *given: packed_product(card, *given)
    yield "packed file: Q4_K", lambda *given: packed_file(card, *given)


# ------------------------------------------------------------------ answers


def versions(card: Card) -> Answer:
    modules = {module.__name__: module.__version__ for module in (medusa, torch, transformers)}
    order = getattr(torch._C, "_get_sdp_priority_order", list)()
    return modules | {"device": device_name(card.device), "attention": [int(each) for each in order]}


def noise(card: Card) -> Answer:
    seeds, positions = torch.tensor([5, 2**62 + 7]), torch.arange(8).expand(2, -1)
    here = seeds.to(card.device), positions.to(card.device)
    are_bits = torch.equal(hashed_bits(*here, 5000).cpu(), hashed_bits(seeds, positions, 5000))
    drawn, expected = gumbel_noise(*here, 5000).cpu(), gumbel_noise(seeds, positions, 5000)
    return {"same bits": are_bits, "largest difference": float((drawn - expected).abs().max())}


def agreement(card: Card, dtype: torch.dtype, step: str, drafter: str, rule: str) -> Answer:
    """The fraction of the text that equals plain decoding; twice where graphs are kept for the second."""
    base, prompt = card.base(dtype, TINY), card.prompt(2, 40)
    model = MedusaModel(base, MedusaHeads(HeadsConfig(TINY["hidden_size"], TINY["vocab_size"], 3)), bushy(12))
    options = {**RULES[rule], "max_new_tokens": 12 if card.is_tiny else 60}
    plain = model.generate(prompt, **options, tree=CandidateTree.chain(0))
    found = [model.generate(prompt, **options, drafter=drafter, step=step) for _ in range(2)]
    return {"same": [float((each == plain)[:, 40:].float().mean()) for each in found]}


def seconds_of_steps(card: Card, shape: str, step: str, nodes: str, drafter: str = "heads") -> Answer:
    model, num_nodes, heads = card.large(shape), int(nodes.split()[0]), None
    config = model.config
    if num_nodes > 1:
        heads = MedusaHeads(HeadsConfig(config.hidden_size, config.vocab_size, 4))
    runs = MedusaModel(model, heads, None if heads is None else bushy(num_nodes))
    return timed_steps(card, runs, step, drafter if heads else "plain")


def timed_steps(card: Card, runs: MedusaModel, step: str, drafter: str) -> Answer:
    counted = DecodingStatistics()
    for _ in range(2):
        counted = DecodingStatistics()
        given = {"do_sample": False, "max_new_tokens": 6 if card.is_tiny else 65, "step": step}
        options = {**given, "statistics": counted, "drafter": drafter}
        for _ in runs.stream(card.prompt(1, 16 if card.is_tiny else 400), **options):
            pass
        wait_for(card.device)
    answer = {"ms": 1e3 * counted.decode_seconds / max(1, counted.num_passes), "passes": counted.num_passes}
    if card.device.type == "cuda":
        answer["peak GiB"] = torch.cuda.max_memory_allocated(card.device) / 2**30
    card.last = runs
    return answer


def shared_agreement(card: Card, step: str, rows: str, rule: str) -> Answer:
    """The fraction of requests whose text is that of plain decoding alone; they join a few calls apart, and
    no two are equally long."""
    base, num_rows = card.base(torch.float32, TINY), int(rows.split()[0])
    heads = MedusaHeads(HeadsConfig(TINY["hidden_size"], TINY["vocab_size"], 3))
    model = MedusaModel(base, heads, bushy(12), step=step)
    most = 6 if card.is_tiny else 40
    asked = [(card.prompt(1, 10 + 3 * place), most + 2 * place) for place in range(2 * num_rows)]
    shared = model.continuous_batch(BatchLimits(max_rows=num_rows))
    requests = [Row(model.request(ids, **RULES[rule], max_new_tokens=most)) for ids, most in asked]
    for row in requests:
        shared.add(row)
        shared.step()
    while shared.is_busy:
        shared.step()
    same = 0
    for row, (ids, most) in zip(requests, asked, strict=True):
        plain = model.generate(
            ids, **RULES[rule], max_new_tokens=most, tree=CandidateTree.chain(0), step="general"
        )
        same += row.tokens == plain[0, ids.shape[1] :].tolist()
    return {"same": [same / len(requests)]}


def shared_model(card: Card, shape: str, step: str) -> MedusaModel:
    """A model of that shape with heads and a small tree, as pays where rows share passes."""
    base = card.large(shape)
    heads = MedusaHeads(HeadsConfig(base.config.hidden_size, base.config.vocab_size, 4))
    return MedusaModel(base, heads, bushy(8), step=step)


def request_of(card: Card, model: MedusaModel, num_tokens: int) -> Row:
    prompt = card.prompt(1, 16 if card.is_tiny else 400)
    return Row(model.request(prompt, do_sample=False, max_new_tokens=num_tokens))


def seconds_of_rows(card: Card, shape: str, step: str, rows: str) -> Answer:
    """The second time, when all is captured."""
    model, num_rows = shared_model(card, shape, step), int(rows.split()[0])
    shared = model.continuous_batch(BatchLimits(max_rows=num_rows))
    for _ in range(2):
        shared.statistics = counted = DecodingStatistics()
        shared._clock.statistics = counted
        for _ in range(num_rows):
            shared.add(request_of(card, model, 6 if card.is_tiny else 65))
        while shared.is_busy:
            shared.step()
        wait_for(card.device)
    ms = 1e3 * counted.decode_seconds / max(1, counted.num_passes)
    return {"ms": ms, "passes": counted.num_passes, "setup s": counted.setup_seconds}


def clients(card: Card, shape: str, step: str, clients: str) -> Answer:
    """Each asks again as soon as it is answered, three times, after a round that captures."""
    model, num_clients = shared_model(card, shape, step), int(clients.split()[0])
    shared = model.continuous_batch(BatchLimits(max_rows=num_clients))
    num_tokens = 4 if card.is_tiny else 64
    for num_rounds in (1, 3):
        waits, num_left, num_written = [], num_clients * num_rounds, 0
        began, asked_at = time.perf_counter(), {}
        for _ in range(num_clients):
            row = request_of(card, model, num_tokens)
            shared.add(row)
            asked_at[row] = time.perf_counter()
            num_left -= 1
        while shared.is_busy:
            for output in shared.step():
                if output.row in asked_at:
                    waits.append(time.perf_counter() - asked_at.pop(output.row))
                num_written += len(output.tokens)
                if output.finish_reason is not None and num_left:
                    row = request_of(card, model, num_tokens)
                    shared.add(row)
                    asked_at[row] = time.perf_counter()
                    num_left -= 1
        seconds = time.perf_counter() - began
    return {
        "tokens/s": num_written / seconds,
        "first token s": statistics.median(waits),
        "longest s": max(waits),
    }


def kernels(card: Card) -> Answer:
    """Times of one replay of the steps that were timed last: in total, of all its kernels together, and of
    the longest, each with its number."""
    from torch.profiler import ProfilerActivity, profile

    rows = list(card.last._executor.captured)[-1]
    graph = next(iter(rows._graphs._graphs.values()))
    assert rows._state is not None
    num_unread = rows._state.num_unread

    def step() -> None:
        num_unread.zero_()  # there is room for the results of a few steps until they are read
        graph.replay()

    replay = card.milliseconds(step, runs=5)["median"]
    if card.is_tiny:
        return {"replay ms": replay}
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        wait_for(card.device)
    found = [(each.device_time_total / 1e3, each.count, each.key[:60]) for each in profiled.key_averages()]
    longest = sorted(found, reverse=True)[:12]
    totals = {"kernels ms": sum(each[0] for each in found), "kernels": sum(each[1] for each in found)}
    return {"replay ms": replay, **totals, "longest": longest}


def packed_kernel(card: Card, name: str, dtype_name: str) -> Answer:
    """The largest difference to torch's operators in float32, and milliseconds of both in this type."""
    from medusa.engine.card.attention_kernel import tree_attention
    from medusa.engine.card.rotary_kernel import turned_queries
    from medusa.engine.card.row_kernels import NormWeights, gated, sum_and_norm

    options: Any = {"device": card.device, "dtype": getattr(torch, dtype_name)}
    nodes, heads, groups, width, slots = (5, 4, 2, 16, 64) if card.is_tiny else (64, 32, 8, 128, 4096)
    rows = torch.randn(1, nodes, (heads + 2 * groups) * width, **options)
    keys, values = (torch.randn(1, groups, slots, width, **options) for _ in range(2))
    mask = torch.ones(1, 1, nodes, slots, device=card.device, dtype=torch.bool).tril(slots - nodes)
    half = rows.shape[-1] // 2

    def ours() -> torch.Tensor:
        if name == "rows":
            return sum_and_norm(rows, rows, NormWeights(rows[0, 0], 1e-6))[1]
        if name == "gate":
            return gated(rows, is_silu=True)
        angles = rows[..., :width].contiguous()
        places = torch.arange(nodes, device=card.device)[None]
        if name == "angles":
            return turned_queries(rows, angles, angles, places, keys.clone(), values.clone())
        queries = rows[..., : heads * width].unflatten(2, (heads, width)).contiguous()
        return tree_attention(queries, keys, values, mask, width**-0.5)

    def theirs(as_type: torch.dtype) -> torch.Tensor:
        given = rows.to(as_type)
        if name == "rows":
            return F.rms_norm(given + given, given.shape[-1:], given[0, 0], 1e-6)
        if name == "gate":
            return F.silu(given[..., :half]) * given[..., half:]
        queries = given[..., : heads * width].unflatten(2, (heads, width)).transpose(1, 2)
        if name == "angles":
            angles = given[:, None, :, :width]
            first, second = queries.chunk(2, dim=-1)
            return (queries * angles + torch.cat([-second, first], dim=-1) * angles).transpose(1, 2)
        entries = [entry.to(as_type) for entry in (keys, values)]
        return F.scaled_dot_product_attention(queries, *entries, attn_mask=mask, enable_gqa=True).transpose(
            1, 2
        )

    expected = theirs(torch.float32)
    difference = float((ours().float() - expected).abs().max() / expected.abs().max())
    times = {"ms": card.milliseconds(ours), "theirs ms": card.milliseconds(lambda: theirs(rows.dtype))}
    return {"difference": difference, **times}


def packed_model(card: Card, base: Any, engine: str, num_nodes: int) -> MedusaModel:
    """A model that computes its layers with the kernels, or for "eager" with its modules."""
    config, heads = base.config, None
    if num_nodes > 1:
        heads = MedusaHeads(HeadsConfig(config.hidden_size, config.vocab_size, 3))
    tree = None if heads is None else bushy(num_nodes)
    if engine == "packed" and card.device.type != "cuda":  # in the interpreter; there the name means others
        return MedusaModel(fused_on_card(base), heads, tree, engine="eager")
    return MedusaModel(base, heads, tree, engine=engine)


def packed_agreement(card: Card, step: str, drafter: str) -> Answer:
    """The fraction of the text that equals plain decoding by the same kernels, and by the modules."""
    base, prompt = card.base(torch.float32, TINY), card.prompt(2, 9 if card.is_tiny else 40)
    options = {"do_sample": False, "max_new_tokens": 3 if card.is_tiny else 60}
    plain = packed_model(card, base, "eager", 1).generate(prompt, **options, drafter="plain")
    model = packed_model(card, base, "packed", 8)
    alone = model.generate(prompt, **options, drafter="plain", step="general")
    answer = model.generate(prompt, **options, drafter=drafter, step=step)
    shares = [float((answer == text)[:, prompt.shape[1] :].float().mean()) for text in (alone, plain)]
    return {"same": shares}


def packed_steps(card: Card, shape: str, step: str, nodes: str, engine: str) -> Answer:
    num_nodes = int(nodes.split()[0])
    base = card.base(torch.float32, TINY) if card.is_tiny else card.large(shape)
    model = packed_model(card, base, engine, num_nodes)
    return timed_steps(card, model, step, "heads" if num_nodes > 1 else "plain")


def random_blocks(card: Card, kind: int, num_outputs: int, num_inputs: int) -> Any:
    """A matrix of any codes, with scales that keep products about one."""
    from medusa.engine.card.stored_blocks import FORMS, StoredBlocks

    form = FORMS[kind]
    num_bytes = num_inputs // form.block * form.num_bytes
    rows = torch.randint(256, (num_outputs, num_bytes), dtype=torch.uint8, device=card.device)
    matrix = StoredBlocks.of(rows, kind)
    matrix.scales.fill_(1e-5)
    if matrix.minima is not None:
        matrix.minima.fill_(1e-5)
    return matrix


def packed_product(card: Card, kind: str, rows: str) -> Answer:
    """Milliseconds, and how much of the blocks is read a second, beside a product in bfloat16 of the shape of
    the gates of 8B."""
    from medusa.engine.card.block_kernels import block_product

    num_outputs, num_inputs = (64, 256) if card.is_tiny else (28672, 4096)
    dtype = torch.float32 if card.is_tiny else torch.bfloat16
    matrix = random_blocks(card, BLOCKS[kind], num_outputs, num_inputs)
    x = torch.randn(int(rows.split()[0]), num_inputs, device=card.device, dtype=dtype)
    weight = torch.randn(num_outputs, num_inputs, device=card.device, dtype=dtype)
    products = x.new_empty(len(x), num_outputs)
    taken = card.milliseconds(lambda: block_product(x, matrix, None, products))["median"]
    theirs = card.milliseconds(lambda: F.linear(x, weight))["median"]
    return {"ms": taken, "GB/s": matrix.num_bytes / taken / 1e6, "bfloat16 ms": theirs}


def packed_file(card: Card, kind: str) -> Answer:
    """A base of 8B shape whose matrices are all of one type: its memory, and milliseconds of a step."""
    from medusa.engine.card.block_modules import QuantisedLinear, QuantisedLookup

    tiny = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    sizes = TINY | tiny if card.is_tiny else SHAPES["8B"]
    dtype = torch.float32 if card.is_tiny else torch.bfloat16
    before = torch.cuda.memory_allocated(card.device) if card.device.type == "cuda" else 0
    with torch.device("meta"):
        config = LlamaConfig(**sizes, max_position_embeddings=8192, eos_token_id=None, pad_token_id=0)
        base = LlamaForCausalLM._from_config(config, dtype=dtype).eval()
    for parent in list(base.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, torch.nn.Linear | torch.nn.Embedding):
                held = QuantisedLinear if isinstance(child, torch.nn.Linear) else QuantisedLookup
                matrix = random_blocks(card, BLOCKS[kind], *child.weight.shape)
                setattr(parent, name, held(child, matrix, dtype))
    for module in base.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                module._parameters[name] = torch.nn.Parameter(torch.ones_like(parameter, device=card.device))
    base.model.rotary_emb = type(base.model.rotary_emb)(config).to(card.device)
    answer: dict[str, Any] = {}
    if card.device.type == "cuda":
        answer["GiB"] = (torch.cuda.memory_allocated(card.device) - before) / 2**30
    for num_nodes in (1,) if card.is_tiny else (1, 8, 64):
        model = packed_model(card, base, "packed", num_nodes)
        drafter = "heads" if num_nodes > 1 else "plain"
        answer[f"{num_nodes} nodes"] = timed_steps(card, model, card.steps[-1], drafter)
    return answer


def attention(card: Card, backend: str, nodes: str, keys: str) -> Answer:
    num_nodes, length = int(nodes.split()[0]), int(keys.split()[0])
    heads, groups, width = (4, 2, 16) if card.is_tiny else (32, 8, 128)
    options: Any = {"device": card.device, "dtype": torch.bfloat16}
    query = torch.randn(1, heads, num_nodes, width, **options)
    key, value = (torch.randn(1, groups, length, width, **options) for _ in range(2))
    mask = torch.ones(1, 1, num_nodes, length, device=card.device, dtype=torch.bool).tril(length - num_nodes)

    def repeated() -> torch.Tensor:
        given = [each.repeat_interleave(heads // groups, dim=1) for each in (key, value)]
        return F.scaled_dot_product_attention(query, *given, attn_mask=mask)

    def grouped() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(backend.startswith("with "))
    try:
        return {"repeated ms": card.milliseconds(repeated), "grouped ms": card.milliseconds(grouped)}
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@torch.no_grad()
def theirs(card: Card) -> Answer:
    base, ids = card.large(), card.prompt(1, 16 if card.is_tiny else 400)
    cache = DynamicCache(config=base.config)
    kept = {cache_argument(base): cache, "use_cache": True}
    base(input_ids=ids, **kept)
    one = {"input_ids": ids[:, :1], **kept}
    return {"ms": card.milliseconds(lambda: base(**one))["median"]}


def theirs_compiled(card: Card) -> Answer:
    ids, taken = card.prompt(1, 400), []
    for num_tokens in (2, 65):
        began = time.perf_counter()
        card.large().generate(ids, max_new_tokens=num_tokens, do_sample=False, cache_implementation="static")
        wait_for(card.device)
        taken.append(time.perf_counter() - began)
    return {"setup s": taken[0], "ms": 1e3 * taken[1] / 64}


def training(card: Card) -> Answer:
    """In bfloat16 under a frozen base, 2,048 tokens a row: only states, then four heads on them."""
    base, ids = card.large(), card.prompt(1 if card.is_tiny else 4, 32 if card.is_tiny else 2048)
    base.requires_grad_(False)
    embedding = base.get_output_embeddings()
    config = HeadsConfig(base.config.hidden_size, base.config.vocab_size, 4)
    heads = MedusaHeads(config).to(card.device)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=1e-4)

    def states() -> torch.Tensor:
        with torch.no_grad():
            return hidden_states(base, ids)

    def step() -> None:
        hidden = states()
        for head in range(4):
            logits = heads.logits_of(head, hidden[:, : -head - 2], embedding)
            F.cross_entropy(logits.flatten(0, 1).float(), ids[:, head + 2 :].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    alone, whole = (card.milliseconds(work, runs=3)["median"] for work in (states, step))
    return {"states tokens/s": 1e3 * ids.numel() / alone, "trained tokens/s": 1e3 * ids.numel() / whole}


# ------------------------------------------------------------------ asking


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask the questions; 1 where one has failed, or there is no card."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="minutes after which no further question starts"
    )
    parser.add_argument("--only", nargs="+", default=[""], help="how the names of those begin that are asked")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ...")
    parser.add_argument("--tiny", action="store_true", help="ask all of them of a tiny model")
    parser.add_argument("--dry-run", action="store_true", help="the same on a CPU")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print(
            f"device must be one that torch sees, got {options.device!r}, and it sees no CUDA device; run "
            "this where there is one, or see it work here with --dry-run",
            file=sys.stderr,
        )
        return 1
    card = Card("cpu" if options.dry_run else options.device, options.tiny or options.dry_run)
    began, has_failed = time.monotonic(), False
    for name, ask in questions(card):
        if not name.startswith(tuple(options.only)):
            continue
        at = time.monotonic() - began
        if at > 60 * options.minutes:
            print(json.dumps({"question": name, "left": "the time was up"}), flush=True)
            continue
        said: dict[str, Any] = {"question": name, "at": round(at, 1)}
        try:
            _, _, given = name.partition(": ")
            said["answer"] = answer = ask(*given.split(", ")) if takes_words(name) else ask()
            has_failed |= name.startswith(("exact", "packed exact")) and min(answer["same"]) < 1
        except Exception as error:
            said["error"], has_failed = f"{type(error).__name__}: {error}"[:600], True
        print(json.dumps(said), flush=True)
    return int(has_failed)


def takes_words(name: str) -> bool:
    """Whether what is asked is said behind the colon of a question."""
    kind = name.partition(": ")[0]
    return kind in WITH_WORDS or kind.startswith("packed ")


if __name__ == "__main__":
    sys.exit(main())
