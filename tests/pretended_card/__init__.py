"""Two graphics cards that are only pretended, for a torch without CUDA: import it before torch.

Tensors on "cuda:0" and "cuda:1" hold numbers in the host's memory, and their operators are those of the CPU,
so what a card computes here is what the CPU computes. What differs is what a card does otherwise:

- tensors of several devices do not mix, by CUDA's own rules;
- the host waits for the device where it reads a number, a shape or a copy: each time is counted, with the
  line that asked, and refused while a stream is captured;
- ``torch.cuda.CUDAGraph`` replays what was launched on the memory of its capture. It keeps nothing alive but
  what was made in the capture, and a read of memory that was given back is an error.

Streams, rounding, time and limits of memory are not modelled. A process that has imported this is of no other
use: torch is changed for good.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

assert "torch" not in sys.modules, "torch asks for devices once, when it is imported: import this before"


def _library_path(torch_home: Path) -> Path:
    """The compiled ``card.cpp``, made where it is not there: ten seconds, once for each version of torch."""
    source = Path(__file__).with_name("card.cpp")
    cache = Path(os.environ.get("MEDUSA_CACHE", tempfile.gettempdir())) / "pretended_card"
    path = cache / f"card-{importlib.metadata.version('torch')}-{int(source.stat().st_mtime)}.so"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        flags = ["-std=c++20", "-O0", "-fPIC", "-shared", "-w", f"-I{torch_home / 'include'}"]
        libraries = [f"-L{torch_home / 'lib'}", "-ltorch_cpu", "-lc10"]
        subprocess.run(["g++", *flags, str(source), "-o", str(partial), *libraries], check=True)
        partial.rename(path)
    return path


_spec = importlib.util.find_spec("torch")
assert _spec is not None and _spec.origin is not None
_home = Path(_spec.origin).parent
for _name in ("libgomp", "libc10", "libtorch_cpu"):
    for _path in sorted((_home / "lib").glob(f"{_name}*.so*")):
        ctypes.CDLL(str(_path), mode=ctypes.RTLD_GLOBAL)
ctypes.CDLL(str(_library_path(_home)), mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten  # noqa: E402

_ops = torch.ops.pretended_card

# ------------------------------------------------------------------ what is seen


class Seen:
    """What the cards were asked for."""

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        """Times that the host waited: operator and line -> number."""
        self.launches: Counter[str] = Counter()
        """Operators that ran on a card."""


_watching: list[Seen] = []
_capturing: list[PretendedGraph] = []


@contextmanager
def watched() -> Iterator[Seen]:
    """What the cards are asked for within the block."""
    seen = Seen()
    _watching.append(seen)
    try:
        yield seen
    finally:
        _watching.remove(seen)


def _asking_line() -> str:
    """The innermost line of the project, or of anybody but torch where there is none."""
    frame, others = sys._getframe(2), ""
    while frame is not None:
        name = frame.f_code.co_filename
        short = re.sub(r".*/site-packages/|.*/(?=(medusa|tests)/)", "", name)
        if short.startswith("medusa/"):
            return f"{short}:{frame.f_lineno}"
        if not short.startswith(("torch/", "tests/pretended_card", "<")):
            others = others or f"{short}:{frame.f_lineno}"
        frame = frame.f_back
    return others


def _wait(what: str) -> None:
    where = f"{what} at {_asking_line()}"
    if _capturing:
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({where})")
    for seen in _watching:
        seen.waits[where] += 1


def _launch(name: str) -> None:
    for seen in _watching:
        seen.launches[name] += 1


# ------------------------------------------------------------------ operators

ASKS_HOST = {
    "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive", "bincount",
    "is_nonzero", "repeat_interleave.Tensor", "multinomial", "linalg_inv_ex",
}  # fmt: skip
"""Operators of which the host must know the result, or its shape."""
INDEXING = {"index.Tensor", "_unsafe_index.Tensor", "_index_put_impl_", "index_put", "index_put_"}


def _mixing_scalars() -> set[str]:
    """The operators to which a card lets CPU scalars be given, as torch's own table has it."""
    import torchgen

    table = (Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml").read_text("utf-8")
    blocks = re.split(r"\n(?=- func: )", table)
    names = (re.match(r"- func: ([\w.]+)\(", block) for block in blocks if "device_check: NoCheck" in block)
    return {name[1] for name in names if name}


_mixes_scalars = _mixing_scalars()


def _check_devices(name: str, tensors: list[Tensor]) -> None:
    """Refuse what CUDA refuses: tensors of several devices in one operator."""
    if name in INDEXING:  # indices may be on the host, and are copied
        if any(not each.is_cuda for each in tensors[1:]) and len({each.device for each in tensors}) == 2:
            return _wait(f"{name} with indices of the host")
    elif name in _mixes_scalars:
        tensors = [each for each in tensors if each.dim() or each.is_cuda]
    if len(devices := {str(each.device) for each in tensors}) > 1:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(sorted(devices))}! (in {name} at {_asking_line()})"
        )
    return None


def _host(value: Any, owns: bool = True) -> Any:
    if isinstance(value, Tensor) and value.is_cuda:
        return _ops.on_host(value, owns)
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


def _written(op: Any, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that ``op`` writes to."""
    declared = enumerate(op._schema.arguments)
    given = [(each, args[at] if at < len(args) else kwargs.get(each.name)) for at, each in declared]
    return [value for each, value in given if each.alias_info is not None and each.alias_info.is_write]


def _run(op: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run ``op`` on the host, over the memory of the cards; what is new lies on the card."""
    leaves, spec = tree_flatten((args, kwargs))
    places = [each if isinstance(each, torch.device) else each.device for each in leaves
              if isinstance(each, (Tensor, torch.device))]  # fmt: skip
    place = next(each for each in places if each.type == "cuda")
    written = _written(op, args, kwargs)
    grown = {id(each): torch.empty_like(_host(each)) for each in tree_leaves(written) if not each.numel()}
    hosts = [grown.get(id(each), each) for each in leaves]
    host_args, host_kwargs = tree_unflatten([_host(each) for each in hosts], spec)
    results = _computed(op, host_args, host_kwargs)
    for each in tree_leaves(written):  # what was empty may have been made larger
        if id(each) in grown and grown[id(each)].numel():
            each.resize_(grown[id(each)].shape)
            _host(each).copy_(grown[id(each)])
    written = iter(written)
    if len(op._schema.returns) == 1:
        return _on_card(results, op._schema.returns[0], written, place)
    return tuple(
        _on_card(*each, written, place) for each in zip(results or (), op._schema.returns, strict=True)
    )


def _computed(op: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    if op is torch.ops.aten.histc.default and not args[0].is_floating_point():  # a card counts whole numbers
        return op(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
    return op(*args, **kwargs)


def _on_card(result: Any, declared: Any, written: Iterator[Any], place: torch.device) -> Any:
    if declared.alias_info is not None and declared.alias_info.is_write:
        return next(written)
    if isinstance(result, list):
        return [_on_card(each, declared, written, place) for each in result]
    if not isinstance(result, Tensor):
        return result
    assert declared.alias_info is None, "a view that is not known here"
    made = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=place)
    _host(made).copy_(result)
    return made


def _any_operator(op: Any, *args: Any, **kwargs: Any) -> Any:
    name = op.name().removeprefix("aten::").removesuffix(".default")
    leaves = tree_leaves((args, kwargs))
    _check_devices(name, [each for each in leaves if isinstance(each, Tensor)])
    is_masked = name in INDEXING and any(
        isinstance(each, Tensor) and each.dtype == torch.bool for each in args[1]
    )
    has_no_kernel = name == "_grouped_mm" and args[0].dtype != torch.bfloat16  # expert by expert, on the host
    if name in ASKS_HOST or is_masked or has_no_kernel:
        _wait(name)
    _launch(name)
    types = [str(each.type) for each in op._schema.arguments]  # numbers may stand where tensors are declared
    args = tuple(
        torch.tensor(value) if kind == "Tensor" and isinstance(value, (bool, int, float)) else value
        for value, kind in zip(args, types, strict=False)
    )
    return (_capturing[-1].record if _capturing else _run)(op, args, kwargs)


def _copy(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if self.is_cuda and source.is_cuda:
        _launch("copy_")
    elif self.is_cuda and non_blocking and not _capturing:
        _launch("copy_ from the host")
    else:
        _wait("a copy from the host" if self.is_cuda else "a copy to the host")
    if _capturing:
        return _capturing[-1].record(torch.ops.aten.copy_.default, (self, source), {})
    _host(self).copy_(_host(source))
    return self


def _read(self: Tensor) -> Any:
    _wait("a number read by the host")
    return _host(self).item()


_sdpa = torch.nn.functional.scaled_dot_product_attention


def _attend(query, key, value, mask, is_causal, scale, grouped):
    return _sdpa(query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=grouped)


def _attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """One operator where no gradient is wanted, as on a card; the CPU's own."""
    wants_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    if wants_gradient or not query.is_cuda:
        return _sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return _ops.attention(query, key, value, attn_mask, is_causal, scale, enable_gqa)


# ------------------------------------------------------------------ graphs


class PretendedGraph:
    """In the place of ``torch.cuda.CUDAGraph``."""

    made: list[PretendedGraph] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.num_replays = 0
        self._calls: list[tuple[Any, tuple, dict[str, Any], list[Tensor]]] = []
        self._outside: dict[int, tuple[Tensor, int]] = {}  # by address: memory that this does not keep
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def num_launches(self) -> int:
        return len(self._calls)

    def pool(self) -> tuple[int, int]:
        return 0, id(self)

    def begin(self) -> None:
        self._first = _ops.birth(torch.empty(1, device="cuda"))
        PretendedGraph.made.append(self)

    def end(self) -> None:
        for memory, content in self._before.values():  # a capture runs nothing
            memory.copy_(content)
        self._before = {}

    def _remembered(self, value: Any) -> Any:
        """``value`` on the host, by its address alone unless it was made in the capture."""
        if not isinstance(value, Tensor) or not value.is_cuda:
            return _host(value)
        birth = _ops.birth(value)
        if is_outside := 0 < birth <= self._first:
            host = _ops.on_host(value, False)
            self._outside.setdefault(host.untyped_storage().data_ptr(), (host, birth))
        return _ops.on_host(value, not is_outside)

    def record(self, op: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        for each in tree_leaves(_written(op, args, kwargs)):
            whole = torch.empty(0, dtype=torch.uint8).set_(_ops.on_host(each, False).untyped_storage())
            if 0 < _ops.birth(each) <= self._first and whole.data_ptr() not in self._before:
                self._before[whole.data_ptr()] = whole, whole.clone()
        if op is torch.ops.aten.copy_.default:
            _host(args[0]).copy_(_host(args[1]))
            out = args[0]
        else:
            out = _run(op, args, kwargs)
        given = tree_map(self._remembered, (args, kwargs))
        results = [self._remembered(each) for each in tree_leaves(out) if isinstance(each, Tensor)]
        self._calls.append((op, *given, results))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        self.num_replays += 1
        _launch("replay")
        for host, birth in self._outside.values():
            if _ops.birth(host) != birth:
                raise RuntimeError("a graph reads or writes memory that was given back")
        for op, args, kwargs, results in self._calls:
            again = [each for each in tree_leaves(_computed(op, args, kwargs)) if isinstance(each, Tensor)]
            for place, result in zip(results, again, strict=True):
                if place.data_ptr() != result.data_ptr():
                    place.copy_(result)


@contextmanager
def _capture(graph: PretendedGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"):
    assert capture_error_mode == "thread_local", "other threads may go on meanwhile"
    graph.begin()
    _capturing.append(graph)
    try:
        yield
    finally:
        _capturing.pop()
        graph.end()


# ------------------------------------------------------------------ torch.cuda


class _Device:
    """In the place of ``torch.cuda.device``."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = _ops.choose(self.index)

    def __exit__(self, *_: Any) -> None:
        _ops.choose(self.before)


def _index(device: Any) -> int:
    index = device if isinstance(device, int) else None if device is None else torch.device(device).index
    return _ops.choose(-1) if index is None else index


class _Stream:
    """In the place of ``torch.cuda.Stream``: work is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass


PROPERTIES = SimpleNamespace(name="a pretended card", major=9, minor=0, total_memory=80 * 2**30,
                             multi_processor_count=132, uuid="pretended")  # fmt: skip
TORCH_CUDA: dict[str, Any] = {
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: 2,
    "current_device": lambda: _ops.choose(-1),
    "set_device": lambda device: _ops.choose(_index(device)) and None,
    "get_device_name": lambda device=None: PROPERTIES.name,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_properties": lambda device=None: PROPERTIES,
    "is_bf16_supported": lambda including_emulation=True: True,
    "mem_get_info": lambda device=None: (70 * 2**30, 80 * 2**30),
    "synchronize": lambda device=None: _wait("synchronize"),
    "Stream": _Stream,
    "current_stream": _Stream,
    "stream": lambda stream: nullcontext(),
    "device": _Device,
    "CUDAGraph": PretendedGraph,
    "graph": _capture,
    "graph_pool_handle": lambda: (0, 0),
    "is_current_stream_capturing": lambda: bool(_capturing),
    "empty_cache": lambda: None,
    "memory_allocated": lambda device=None: 0,
    "memory_reserved": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0,
    "reset_peak_memory_stats": lambda device=None: None,
    "manual_seed_all": lambda seed: None,
    "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
    "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8)] * 2,
    "set_rng_state": lambda state, device="cuda": None,
    "set_rng_state_all": lambda states: None,
}
for _name, _instead in TORCH_CUDA.items():
    setattr(torch.cuda, _name, _instead)
torch.nn.functional.scaled_dot_product_attention = _attention
_libraries = [
    torch.library.Library(*each) for each in (("_", "IMPL"), ("aten", "IMPL"), ("pretended_card", "FRAGMENT"))
]
_libraries[0].fallback(_any_operator, "CUDA")
_libraries[1].impl("copy_", _copy, "CUDA")
_libraries[1].impl("_local_scalar_dense", _read, "CUDA")
_libraries[1].impl("_fused_sdp_choice", lambda *args, **kwargs: 0, "CUDA")  # where gradients are wanted
_libraries[2].define("attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, "
                     "float? scale, bool grouped) -> Tensor")  # fmt: skip
_libraries[2].impl("attention", _attend, "CPU")
