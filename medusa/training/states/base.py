"""The base model of a run: loaded where it belongs, frozen and checked, and what computes its states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from torch import Tensor

from medusa.base import loading
from medusa.base.architecture_check import check_decodable
from medusa.base.causal_lm import CausalLM, lm_head, lm_head_device
from medusa.base.loading import find_base, is_held_quantised
from medusa.base.profile import context_length, longrope_threshold
from medusa.base.recurrent import is_recurrent
from medusa.engine.views import packed_as
from medusa.engine.weights.load import load_base
from medusa.hardware import is_cpu
from medusa.training.config import BaseOptions, DataOptions
from medusa.training.data.batching import PaddedBatch, collate, plan_in_order
from medusa.training.data.dataset import Document, Documents
from medusa.training.states.apart import hidden_states_apart

_NUM_PACKED = 3
"""Documents of the row on which packing is tried."""
MOST_TOKENS = 512
"""Largest number of tokens of each document; a leak from one document into the next shows in its first
tokens."""


def has_own_arithmetic(base: CausalLM) -> bool:
    """Whether ``base`` computes in one precision only, that of decoding: one whose weights are packed does,
    for autocast would round what its kernels multiply."""
    return packed_as(base) is not None


def own_arithmetic(base: CausalLM) -> AbstractContextManager[Any]:
    """Within this context autocast does not reach a base that :func:`has_own_arithmetic`."""
    return torch.autocast(base.device.type, enabled=False) if has_own_arithmetic(base) else nullcontext()


class DocumentStates(Protocol):
    """Computes the states that are stored."""

    base: CausalLM

    def of_documents(
        self, documents: Documents, wanted: range, layers: tuple[int, ...], options: DataOptions
    ) -> Iterator[tuple[int, Tensor]]:
        """The index and the states (T, (1 + L) * D) of each of the ``wanted`` documents, in any order."""

    def finish(self) -> None:
        """Take part in what the other processes still compute."""


class OnlineHiddenStates:
    """Hidden states of a base that this process runs by itself, on one device or on several."""

    is_shared = False
    """Whether several processes must run it equally often."""

    def __init__(self, base: CausalLM):
        self.base = base

    def __call__(self, padded: PaddedBatch, layers: tuple[int, ...] = ()) -> Tensor:
        """States (B, T, (1 + L) * D) of a micro-batch, without gradients."""
        padded = padded.to(self.base.device)
        with torch.no_grad(), own_arithmetic(self.base):
            return hidden_states_apart(self.base, padded.input_ids, padded.positions, layers)

    def of_documents(
        self, documents: Documents, wanted: range, layers: tuple[int, ...], options: DataOptions
    ) -> Iterator[tuple[int, Tensor]]:
        """See :class:`DocumentStates`."""
        lengths = documents.lengths[wanted.start : wanted.stop]
        for batch in plan_in_order(lengths, options, longrope_threshold(self.base)):
            rows = [[wanted.start + index for index in row] for row in batch]
            for states, (index,) in zip(self(collate(documents, rows), layers), rows, strict=True):
                yield index, states[: documents.lengths[index]]

    def finish(self) -> None:
        """Take part in the other processes' forward passes until none has a micro-batch left."""


class _SharedHiddenStates(OnlineHiddenStates):
    """The states of a base whose weights are split among all processes of the launch.

    All of them must call it, equally often, or :meth:`finish` before they do something else.
    """

    is_shared = True

    def __init__(self, base: CausalLM, reads_alike: bool, timeout_minutes: float):
        """``reads_alike``: True for tensor parallel (all ranks run each rank's batch in turn), False for
        FSDP."""
        super().__init__(base)
        self._reads_alike = reads_alike
        timeout = timedelta(minutes=timeout_minutes)
        self._group = torch.distributed.new_group(backend="gloo", timeout=timeout)  # between the hosts

    def __call__(self, padded: PaddedBatch, layers: tuple[int, ...] = ()) -> Tensor:
        states, _ = self._together(padded, layers)
        assert states is not None
        return states

    def finish(self) -> None:
        is_over = False
        while not is_over:
            _, is_over = self._together(None)

    def _together(
        self, padded: PaddedBatch | None, layers: tuple[int, ...] = ()
    ) -> tuple[Tensor | None, bool]:
        """The states of ``padded`` if there is one, and whether no process had any."""
        batches: list[PaddedBatch | None] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(batches, padded, group=self._group)
        if all(each is None for each in batches):
            return None, True
        if not self._reads_alike:
            nothing = collate(Documents.of([]), [])
            return super().__call__(nothing if padded is None else padded, layers), False
        mine = None
        for rank, batch in enumerate(batches):
            if batch is not None:
                states = super().__call__(batch, layers)
                mine = states if rank == torch.distributed.get_rank() else mine
        return mine, False


def live_states(
    options: BaseOptions, device: torch.device, timeout_minutes: float = 60.0
) -> OnlineHiddenStates:
    """The hidden states of the base model where ``base_placement`` says; all processes load it.

    ``device`` is this process's own.

    Raises:
        FileNotFoundError: as :func:`frozen_base`.
        ValueError: so too, or it is no causal language model.
    """
    base = frozen_base(options, device)
    if options.base_placement == "auto":
        end_on(base, device)
    live = OnlineHiddenStates(base)
    if options.is_shared:
        live = _SharedHiddenStates(base, options.base_placement == "tensor_parallel", timeout_minutes)
    check_causal(live, options.base)
    return live


def frozen_base(options: BaseOptions, device: torch.device, layers: bool = True) -> CausalLM:
    """The base model of a run, frozen and in evaluation mode: where ``base_placement`` says, or on ``device``
    without its layers, as training from stored states reads it. A quantised one computes as decoding does.

    Raises:
        FileNotFoundError: there is no such model.
        ValueError: it is no causal language model, or no tree can be verified on it, so heads for it would be
            of no use; or it cannot be built without its layers.
    """
    source = find_base(options.base, trust_remote_code=options.trust_remote_code)
    is_quantised = is_held_quantised(source)
    on_cpu = is_cpu(device)
    is_here = not layers or options.base_placement == "each" or (is_quantised and on_cpu)
    base: Any = load_base(
        source,
        "auto" if is_quantised else "eager",
        device if is_here else None,
        # many CPUs multiply bfloat16 a hundred times slower than float32
        "float32" if on_cpu and options.base_dtype == "auto" else options.base_dtype,
        layers,
        **({} if options.attention is None else {"attn_implementation": options.attention}),
        **({} if is_here else _spread(options)),
    )
    check_decodable(base, attends_here=False)
    return base.requires_grad_(False).eval()


def end_on(base: CausalLM, device: torch.device) -> None:
    """Put the LM head of a base over several devices on ``device``, where heads are trained:
    ``device_map="auto"`` puts it beside the last layers."""
    if lm_head_device(base) == device or not hasattr(base, "hf_device_map"):
        return
    embedding = lm_head(base)
    remove_hook_from_module(embedding)
    embedding.to(device)
    add_hook_to_module(embedding, AlignDevicesHook(execution_device=device))


def load_tokenizer(options: BaseOptions) -> Any:
    return loading.load_tokenizer(
        options.tokenizer or options.base, trust_remote_code=options.trust_remote_code
    )


def _spread(options: BaseOptions) -> dict[str, Any]:
    """The arguments of ``from_pretrained`` that spread weights over devices as they are read."""
    is_launched = torch.distributed.is_initialized()
    placement = options.base_placement
    num_processes = torch.distributed.get_world_size() if is_launched else 1
    if (placement == "auto") != (num_processes == 1):
        raise ValueError(
            f"base_placement={placement} goes with "
            f"{'one process, which has all devices' if placement == 'auto' else 'several processes'}, got "
            f"{num_processes}; choose {'tensor_parallel or fsdp' if placement == 'auto' else 'auto'}"
        )
    if placement == "auto":
        return {"device_map": "auto"}
    from transformers.distributed import DistributedConfig

    is_fsdp = placement == "fsdp"
    shared = DistributedConfig(fsdp_size=num_processes) if is_fsdp else DistributedConfig(tp_plan="auto")
    return {"distributed_config": shared}


def check_causal(live: OnlineHiddenStates, name: str) -> None:
    """Raise ValueError when the hidden states of a base depend on later tokens, as in an encoder."""
    positions = torch.arange(3).expand(2, 3)
    # One row of two batches of the same shape: two rows of one batch may be rounded otherwise.
    first, second = (
        live(PaddedBatch(ids, positions, ids >= 0))[0, :2]
        for ids in (torch.tensor([[0, 1, 0], [0, 1, 2]]), torch.tensor([[0, 1, 2], [0, 1, 0]]))
    )
    rounding = torch.finfo(first.dtype).eps ** 0.5 * first.abs().max()
    if (first - second).abs().max() > rounding:
        raise ValueError(
            f"base must be a causal language model, got {name!r}, a {type(live.base).__name__} whose states "
            "depend on later tokens; choose a decoder-only one"
        )


def check_documents(base: CausalLM, documents: Documents, name: str) -> None:
    """Raise ValueError when ``base`` cannot read ``documents``: a token has no row in its input
    embedding, or a document is longer than its context."""
    if not len(documents):
        return
    rows = base.get_input_embeddings().weight.shape[0]
    largest = int(documents.tokens.max())
    if largest >= rows:
        raise ValueError(
            f"the tokenizer of {name!r} gives token id {largest}, and its input embedding has {rows} rows; "
            "base and tokenizer do not belong together: use the tokenizer that the base was saved with"
        )
    context = context_length(base)
    longest = int(documents.lengths.max())
    if context is not None and longest > context:
        raise ValueError(
            f"max_length must be at most {context}, the context of {name!r}, and a document has {longest} "
            f"tokens; pass --max_length {context}"
        )


def check_packing(live: OnlineHiddenStates, documents: Documents, options: DataOptions) -> None:
    """Raise ValueError when documents that share a row see each other.

    Whether a restart of the position ids separates documents depends on the architecture, and no property
    declares it. So some documents are read in rows of their own and packed in one row, and the results are
    compared.
    """
    if not options.packing or len(documents) < 2:
        return
    name = type(live.base).__name__
    switch = longrope_threshold(live.base)
    if is_recurrent(live.base) and live.is_shared:
        raise ValueError(
            f"packing must separate documents, and {name} keeps a state, so each is read by itself, in as "
            "many passes as they need, and processes that share one base must have equally many; pass "
            "--packing false"
        )
    if switch is not None and options.max_length > switch:
        raise ValueError(
            f"packing with {name} needs max_length of at most {switch}, got {options.max_length}: past that "
            "the base reads all documents of a batch with other rotary frequencies (LongRoPE); pass "
            f"--packing false, or --max_length {switch}"
        )
    chosen = (documents[index] for index in documents.spread(_NUM_PACKED))
    some = Documents.of(Document(each.tokens[:MOST_TOKENS], each.is_label[:MOST_TOKENS]) for each in chosen)
    with torch.no_grad():
        packed = live(collate(some, [list(range(len(some)))]))[0]
        alone = [live(collate(some, [[index]]))[0] for index in range(len(some))]
    distances = []
    for index in range(1, len(some)):
        ours = packed[some.starts[index] : some.starts[index + 1]].float()
        theirs = alone[index].float()
        distances.append((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-12))
    distance = float(torch.cat(distances).median())
    allowed = 1e-3 if packed.dtype in (torch.float32, torch.float64) else 0.1
    if distance > allowed:
        raise ValueError(
            f"packing must separate documents, and {name} lets a document see those before it "
            f"in its row: packed, its states are {distance:.1%} away from those it has alone; pass "
            "--packing false"
        )
