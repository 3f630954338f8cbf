"""Tiny random models of every architecture that medusa claims, and drafters that guess well or badly."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not os.path.exists("/dev/nvidiactl"):  # without a card, kernels in Triton run in its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

import functools
import importlib.util
import inspect
import random
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import setuptools  # noqa: F401  # before anything loads the standard distutils: Inductor imports both
import torch
import transformers
from hypothesis import settings
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from medusa import CandidateTree, HeadsConfig, MedusaHeads
from medusa.decoding.batch import Batch, StepResult
from medusa.decoding.batch import decode as decoded
from medusa.decoding.executor import Call, Executor
from medusa.drafters.protocol import Draft, DraftContext, PlainDrafter, StatelessDrafter
from medusa.drafters.suffix import SuffixDrafter
from medusa.engine.libraries import found_compiler

CHECKOUT = Path(__file__).parent.parent
os.environ["MEDUSA_CACHE"] = str(CHECKOUT / ".pytest_cache" / "compiled")  # of tests alone, kept for the next
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):  # the same examples every time: a red run can be repeated
    settings.load_profile("ci")
torch.set_num_threads(1)  # tiny models lose more to waking threads than they win

VOCAB_SIZE = 61
SLIDING_WINDOW = 32
SWITCH = 24
FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [3.0, 5.0, 9.0, 17.0]}
"""Of LongRoPE."""
REAL_BASE = CHECKOUT / "models" / "smollm2-135m-instruct"

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}

ARCHITECTURES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**GROUPED)),
    "mistral-sliding": lambda: MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=SLIDING_WINDOW)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **GROUPED,
            sliding_window=SLIDING_WINDOW,
            layer_types=["sliding_attention", "full_attention"],
            final_logit_softcapping=3.0,
            query_pre_attn_scalar=8,
        )
    ),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
    "phi": lambda: PhiForCausalLM(PhiConfig(**SIZES)),
    "mixtral-moe": lambda: MixtralForCausalLM(
        MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    ),
}

READING: dict[str, dict] = {
    "state alone": {},
    "path too": {"reads_path": True},
    "path in few dimensions": {"reads_path": True, "path_rank": 3},
    "layers too": {"fused_layers": (1, 2)},
    "path and layer": {"reads_path": True, "fused_layers": (1,)},
}
"""What heads read, as parts of their configuration."""

BUSHY = CandidateTree.from_paths(
    [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0), (0, 0, 0, 1)]
)
"""Branches at every depth, and deeper than most heads of tests guess."""

_models: dict[str, PreTrainedModel] = {}


needs_newest = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23),
    reason=f"transformers {transformers.__version__} cannot do it, and 5.23 can",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-pages", action="store_true", help="write the pages of what was tried anew")


needs_kernels = pytest.mark.skipif(found_compiler() is None, reason="no C++ compiler is installed")


def tiny_model(architecture: str) -> PreTrainedModel:
    """A random float32 model, the same one every time."""
    if architecture not in _models:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            _models[architecture] = ARCHITECTURES[architecture]().eval()
    return _models[architecture]


def longrope_model() -> PreTrainedModel:
    """A random Phi-3 whose rotary frequencies change past :data:`SWITCH` tokens."""
    torch.manual_seed(2)
    sizes = {key: value for key, value in GROUPED.items() if key != "head_dim"}
    config = Phi3Config(
        **sizes,
        original_max_position_embeddings=SWITCH,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS},
    )
    return Phi3ForCausalLM(config).eval()


def random_prompts(num_rows: int, length: int, seed: int = 0) -> Tensor:
    """(B, T) long, no special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (num_rows, length), generator=generator)


def left_padded(prompts: Tensor, lengths: list[int]) -> dict[str, Tensor]:
    """The last ``lengths[r]`` tokens of each row as a left-padded batch."""
    mask = torch.zeros_like(prompts)
    for row, length in enumerate(lengths):
        mask[row, prompts.shape[1] - length :] = 1
    return {"input_ids": prompts * mask, "attention_mask": mask}


def counting_model(size: int):
    """A Llama whose hidden state is its last token, one-hot, and whose next token is that plus one."""
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size,
            hidden_size=size,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=4,
            eos_token_id=None,
            pad_token_id=0,
        )
    ).eval()
    with torch.no_grad():
        for layer in base.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        base.model.embed_tokens.weight.copy_(torch.eye(size))
        base.lm_head.weight.copy_(torch.eye(size).roll(1, dims=0))
    return base


def counting_heads(size: int, is_trained: bool = True) -> MedusaHeads:
    """Heads that know how the counting base goes on; untrained, they say its next number again."""
    heads = MedusaHeads(HeadsConfig(size, size, num_heads=3))
    if is_trained:
        for depth, (block,) in enumerate(heads.blocks, start=1):
            block.linear.weight.data.copy_(40 * torch.eye(size).roll(depth, dims=0))
            block.linear.bias.data.fill_(-20)
    return heads


def decode(
    base, drafter, request, statistics=None, adaptive=None, step="general", host_sync_interval=None
) -> Iterator[StepResult]:
    """The steps of one request; ``base`` may be an :class:`Executor`, which keeps what it has compiled."""
    executor = base if isinstance(base, Executor) else Executor(base)
    plan = executor.plan(Call(request, step, drafter))
    if host_sync_interval is not None:
        plan.stepper.interval = host_sync_interval
    guide = drafter, adaptive
    batch = Batch(replace(plan, make_drafter=lambda *_: guide), statistics=statistics)
    return decoded(batch, request)


def assert_exact(model, batch, *hows: dict, expected: Tensor | None = None, **call):
    """Each of ``hows``, more options of the ``call``, gives the text of plain decoding; the last output.

    batch: prompts (B, T) long, or a dictionary of them and their mask. ``expected`` is the text where that is
    not what ``model`` writes plainly, such as that of ``transformers``.
    """
    inputs = batch if isinstance(batch, dict) else {"inputs": batch}
    if expected is None:
        expected = model.generate(**inputs, **call, tree=CandidateTree.chain(0))
    for how in hows:
        out = model.generate(**inputs, **call, **how, return_dict_in_generate=True)
        assert out.sequences.tolist() == expected.tolist(), how
    return out


def random_heads(seed: int = 0, std: float = 0.3, token_map=None, **config) -> MedusaHeads:
    """Heads of random weights for a tiny model, the same for a seed; ``token_map`` makes them score it."""
    if token_map is not None:
        config |= {"unembedding": "token_map", "token_map_size": len(token_map)}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        heads = MedusaHeads(HeadsConfig(32, VOCAB_SIZE, **{"num_heads": 3, **config}), token_map=token_map)
        for parameter in heads.parameters():
            torch.nn.init.normal_(parameter, std=std)
    return heads


class OracleDrafter(StatelessDrafter):
    """Knows the answers, and hides each right token at a random rank, or leaves it out.

    answers: per row, the whole sequence (unpadded prompt and plain answer).
    """

    def __init__(self, answers: list[list[int]], tree: CandidateTree, hit_rate: float, seed: int = 0):
        self.answers, self.tree, self.hit_rate = answers, tree, hit_rate
        self.generator = torch.Generator().manual_seed(seed)
        self.topology = tree.topology()

    @property
    def max_depth(self) -> int:
        return self.tree.depth

    def draft(self, context: DraftContext) -> Draft:
        rows = [self._filled(row, length) for row, length in enumerate(context.lengths.tolist())]
        tokens = torch.tensor(rows)
        tokens[:, 0] = context.root
        return Draft(tokens, self.topology)

    def _filled(self, row: int, length: int) -> list[int]:
        width = max(self.tree.width_by_depth, default=1)
        guesses = torch.randint(0, VOCAB_SIZE, (self.tree.depth, width), generator=self.generator)
        for depth in range(self.tree.depth):
            right = self.answers[row][length + depth : length + depth + 1]
            if right and torch.rand((), generator=self.generator) < self.hit_rate:
                guesses[depth, torch.randint(0, width, (), generator=self.generator)] = right[0]
        return [0] + [int(guesses[len(path) - 1, path[-1]]) for path in self.tree.paths[1:]]

    def keep_rows(self, rows: Tensor) -> None:
        self.answers = [self.answers[row] for row in rows.tolist()]


class RandomDrafting:
    """Lets a drafter take part in half of the steps, in stretches of any length, with any part of its draft.
    A match may rest for it."""

    min_accept_prob = 0.0

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.drafts = self.random.random() < 0.5
        self.fallback = SuffixDrafter(length=3, min_match=1) if seed % 2 else PlainDrafter()

    def select_drafter(self, drafter):
        return drafter if self.drafts else self.fallback

    def num_nodes(self, path_logprob, num_optional_nodes=0) -> int:
        return self.random.randint(1, path_logprob.shape[1])

    def record(self, tokens_per_row, seconds, num_steps=1, used_fallback=False, num_nodes=1) -> None:
        self.drafts = self.random.random() < 0.5


def program(path: str) -> ModuleType:
    """The program at ``path`` in the checkout as a module, a new one every time."""
    spec = importlib.util.spec_from_file_location("program_" + Path(path).stem, CHECKOUT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def hub(tmp_path):
    """A hub of this machine's own, with an empty cache."""
    from fake_hub import fake_hub

    with fake_hub(tmp_path / "hub-cache") as running:
        yield running


@pytest.fixture(scope="session", autouse=True)
def no_pictures_of_tests_among_results():
    """Pictures of tests would look like measurements: programs under test are told where to draw."""
    plots = CHECKOUT / "runs" / "plots"

    def drawn():
        return {path: path.stat().st_mtime for path in plots.glob("*.png")}

    before = drawn()
    yield
    assert drawn() == before, f"a test drew into {plots}; give the program --plot"


@pytest.fixture(scope="session", autouse=True)
def nothing_is_compiled_unasked():
    """Commands compile a model at first use, a minute each; under test those that say so. Gives what this
    keeps from them."""
    from medusa.cli import loading

    own = loading.default_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "default_step", lambda model: "general")
        yield own


@pytest.fixture(scope="session", autouse=True)
def drafts_are_checked():
    """Users wait for no check of medusa's own drafters; here they are held to the rules of any drafter."""
    from medusa.drafters import protocol

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, "is_builtin", lambda drafter: False)
        yield


@pytest.fixture(scope="session", autouse=True)
def certificates_are_read_once():
    """Each client of a server reads all that it trusts, a twentieth of a second; no test asks beyond this
    machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def pictures_are_small():
    """A picture of full size takes a third of a second, and nearly every command and every run draws one."""
    from matplotlib.figure import Figure

    save = Figure.savefig

    def small(figure: Figure, path: Path, dpi: int) -> None:
        figure.set_layout_engine(None)
        save(figure, path, dpi=dpi // 10)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", small)
        yield


@pytest.fixture
def fresh_accelerator():
    """accelerate keeps the precision of the first Accelerator of a process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.fixture(scope="session")
def real_base() -> PreTrainedModel:
    """SmolLM2-135M-Instruct in float32; skips where it has not been fetched."""
    if not REAL_BASE.exists():
        pytest.skip("the embedded base model is not here; `make models` fetches it")
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(REAL_BASE, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def real_tokenizer():
    if not REAL_BASE.exists():
        pytest.skip("the embedded base model is not here; `make models` fetches it")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(REAL_BASE)


@contextmanager
def library_calls(visit: Callable[[FrameType], object]) -> Iterator[None]:
    """Within, ``visit`` gets the frame of each call of a function of the library."""

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED
        if event == "call" and is_function and Path(code.co_filename).is_relative_to(CHECKOUT / "medusa"):
            visit(frame)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
