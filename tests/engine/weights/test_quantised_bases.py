"""A base in a GGUF file: held once in the file's bits, and its text is the same whatever is guessed."""

import faulthandler
import gc
import os
import signal
from pathlib import Path

import pytest
import torch
from conftest import BUSHY, OracleDrafter, assert_exact, left_padded, needs_kernels
from gguf import GGMLQuantizationType as Type
from quantised_files import VOCAB_SIZE, write_model

from medusa import CandidateTree, HeadsConfig, MedusaHeads, MedusaModel
from medusa.base.attention import TREE_ATTENTION
from medusa.base.causal_lm import lm_head, rows_at
from medusa.base.loading import find_base
from medusa.engine import views
from medusa.engine.compiled import CompiledPass, library_paths
from medusa.engine.engine_state import apply_engine
from medusa.engine.views import packed_bytes
from medusa.engine.weights.load import load_base
from medusa.engine.weights.products import GroupQuantisedMatmul, PackedMatmul
from medusa.heads.fingerprint import BaseFingerprint
from medusa.heads.stored_types import stored, widened

pytestmark = needs_kernels
pytest.importorskip("medusa.base.gguf_model", exc_type=ImportError, reason="needs a newer transformers")
MIXTURES = {"Q4_K_M": (Type.Q4_K, Type.Q6_K, 256), "Q5_0": (Type.Q5_0, Type.Q8_0, 128)}
SAMPLINGS = [{"do_sample": False}, {"do_sample": True, "temperature": 0.9, "seed": 3}]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Writes a tiny model once: its path."""
    directory, made = tmp_path_factory.mktemp("gguf"), {}

    def write(architecture="llama", mixture="Q4_K_M", **more):
        key = (architecture, mixture, *more.items())
        if key not in made:
            matrices, others, hidden = MIXTURES[mixture]
            path = directory / f"{len(made)}.gguf"
            made[key] = write_model(path, architecture, matrices, others, hidden, **more)
        return made[key]

    return write


def prompts(num_rows=1, length=12):
    ids = torch.randint(0, 250, (num_rows, length), generator=torch.Generator().manual_seed(5))
    return left_padded(ids, [length - 3 * row for row in range(num_rows)])


def heads_for(path, **more):
    torch.manual_seed(1)
    hidden = find_base(path).hidden_size
    return MedusaHeads(HeadsConfig(hidden, VOCAB_SIZE, **{"num_heads": 4, **more}))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3", "qwen3moe", "gpt-oss"])
def test_in_float32_a_base_is_the_widened_one(architecture, files):
    path = files(architecture)
    wide, packed = load_base(path), load_base(path, "packed")
    ids = prompts()["input_ids"]
    torch.testing.assert_close(packed(ids).logits, wide(ids).logits, atol=1e-4, rtol=1e-4)
    in_whole_numbers = load_base(path, "auto")(ids).logits
    assert not torch.allclose(in_whole_numbers, wide(ids).logits, atol=1e-4)


def test_angles_are_not_rounded_where_weights_are_widened_to_bfloat16(files):
    path = files("llama")
    widened = load_base(path, dtype=torch.bfloat16)
    own = type(widened)(widened.config).model.rotary_emb
    assert widened.dtype == torch.bfloat16
    for name in ("inv_freq", "original_inv_freq"):
        assert torch.equal(getattr(widened.model.rotary_emb, name), getattr(own, name))


def test_a_mixture_has_the_sizes_and_angles_of_its_file(files):
    config = find_base(files("gpt-oss", "Q5_0")).config
    assert config.head_dim == 32
    assert config.rope_parameters["rope_type"] == "yarn" and config.rope_parameters["factor"] == 16.0
    assert config.rope_parameters["original_max_position_embeddings"] == 32
    assert find_base(files("qwen3moe")).config.moe_intermediate_size == 512


@pytest.mark.parametrize("architecture, mixture", [("qwen3moe", "Q4_K_M"), ("gpt-oss", "Q5_0")])
def test_a_tested_mixture_takes_the_kernels_attention_without_a_trial(
    architecture, mixture, files, monkeypatch
):
    fails = "rows that are rounded to 8 bits may choose other experts"
    monkeypatch.setattr(views, "verification_error", lambda view: fails)
    base = load_base(files(architecture, mixture), "auto")
    assert base.config._attn_implementation in TREE_ATTENTION.values()


@pytest.mark.parametrize("missing", ["ffn_up_exps.bias", "ffn_down_exps.bias", "ffn_gate_exps.weight"])
@pytest.mark.parametrize("engine", ["auto", "eager"])
def test_experts_that_lack_a_tensor_are_refused_by_name(engine, missing, files):
    source = find_base(files("gpt-oss", "Q5_0"))
    del source.gguf.tensors[f"blk.1.{missing}"]
    with pytest.raises(
        ValueError, match=r"has no place in|must have a tensor for 'model.layers.1.mlp.experts"
    ):
        load_base(source, engine)


@pytest.mark.parametrize(("engine", "sampling"), [("packed", SAMPLINGS[0]), ("int8", SAMPLINGS[1])])
@pytest.mark.parametrize(
    "architecture, mixture",
    [
        ("llama", "Q4_K_M"),
        ("qwen2", "Q5_0"),
        ("gemma3", "Q4_K_M"),
        ("qwen3moe", "Q4_K_M"),
        ("gpt-oss", "Q5_0"),
    ],
)
def test_no_draft_changes_the_text(architecture, mixture, engine, sampling, files):
    path = files(architecture, mixture)
    model = MedusaModel.from_pretrained(path, engine=engine)
    model = MedusaModel(model.base, heads_for(path, reads_path=True), BUSHY, engine=engine)
    call = {"max_new_tokens": 24, **sampling}
    for batch in (prompts(1), prompts(3)):
        plain = model.generate(**batch, **call, tree=CandidateTree.chain(0))
        oracle = OracleDrafter([row.tolist() for row in plain], BUSHY, hit_rate=0.7, seed=2)
        hows = [{"drafter": name} for name in ("heads", "dynamic-heads", "suffix", "dynamic-heads+suffix")]
        assert_exact(model, batch, *hows, {"drafter": oracle}, {}, expected=plain, **call)
    if engine == "packed":
        assert MedusaModel(load_base(path)).generate(**batch, **call).tolist() == plain.tolist()


@pytest.mark.slow
def test_compiled_steps_write_the_text_of_general_ones_with_any_draft(files):
    """The test of directories compiles the same kind of matrices, each time."""
    base = load_base(files("qwen2", "Q4_K_M", num_layers=4), "int8")
    model = MedusaModel(
        base, heads_for(files("qwen2"), reads_path=True), BUSHY, engine="int8", step="compiled"
    )
    batch, call = prompts(2), {"max_new_tokens": 16, "do_sample": True, "seed": 1}
    plain = model.generate(**batch, **call, tree=CandidateTree.chain(0))
    assert_exact(
        model, batch, {"drafter": "heads"}, {"drafter": "dynamic-heads+suffix"}, expected=plain, **call
    )
    general = MedusaModel(base, engine="int8").generate(**batch, **call, tree=CandidateTree.chain(0))
    assert general.tolist() == plain.tolist()


def in_four_bits(matrix):
    return widened(stored({"": matrix}, "Q4_0")[""], "Q4_0", matrix.shape)


def test_heads_that_a_file_holds_in_four_bits_draft_in_these_and_by_the_kernels(files):
    path = files("llama", "Q4_K_M")
    heads = heads_for(path, reads_path=True, fused_layers=(1,), unembedding="token_map", token_map_size=96)
    heads.token_map.copy_(torch.arange(3, 99))
    for parameter in heads.parameters():
        parameter.data.normal_(std=0.05)
        if parameter.dim() == 2:
            parameter.data = in_four_bits(parameter.data)
    model = MedusaModel(load_base(path, "auto"), heads, BUSHY, engine="auto")
    quick = model.optimized_heads
    products = [module for module in quick.modules() if isinstance(module, PackedMatmul)]
    assert sorted({product.number_format for product in products}) == ["Q4_0", "Q6_K"]
    assert model.make_drafter("dynamic-heads").has_kernels
    hidden = torch.randn(2, 3, heads.config.hidden_size)
    path_tokens = torch.randint(0, 250, (2, 3, 4))
    ours = quick(hidden, lm_head(model.engine_base), path_tokens)
    exact = heads(hidden, lm_head(load_base(path)), path_tokens)
    assert (ours - exact).norm() < 0.02 * exact.norm()


def test_layers_of_any_mixture_share_their_library(files, capsys):
    first = apply_engine(load_base(files("qwen2", "Q4_K_M", num_layers=4), "auto"), "auto")
    CompiledPass(first)
    paths = library_paths(first)
    assert len(paths) == 3, "the ends, and one for all layers, of which some hold Q6_K"
    capsys.readouterr()
    other = write_model(
        files("qwen2", "Q4_K_M", num_layers=4).with_name("other.gguf"),
        "qwen2",
        Type.Q5_K,
        Type.Q4_K,
        num_layers=4,
    )
    second = apply_engine(load_base(other, "packed"), "packed")
    assert set(library_paths(second)) & set(paths), "one for the layers of both"


def test_what_is_held_is_what_the_file_has(files):
    path = files("llama", "Q4_K_M", is_tied=False)
    base, file = load_base(path, "auto"), find_base(path).gguf
    held = packed_bytes(base)
    assert set(held) == {"Q4_K", "Q6_K"}
    matrices = [each for each in file.tensors.values() if len(each.shape) == 2]
    embedding = file.tensors["token_embd.weight"].num_bytes
    assert sum(held.values()) == sum(each.num_bytes for each in matrices) - embedding
    products = [module for module in base.modules() if isinstance(module, GroupQuantisedMatmul)]
    assert sum(module.panels.nbytes for module in products) < 1.25 * sum(held.values()) + 2**16
    assert not any(parameter.numel() > 300 for parameter in base.parameters() if not parameter.isnan().all())


@pytest.mark.parametrize("kind", [Type.BF16, Type.F16, Type.F32])
@pytest.mark.parametrize("is_tied", [True, False])
def test_matrices_that_are_no_quants_are_packed_without_being_widened(kind, is_tied, tmp_path, capsys):
    path = write_model(tmp_path / "plain.gguf", "llama", kind, kind, is_tied=is_tied)
    widened, base = load_base(path), load_base(path, "auto")
    name = {Type.BF16: "bfloat16", Type.F16: "float16", Type.F32: "float32"}[kind]
    assert {each.removesuffix(" in 12 bits") for each in packed_bytes(base)} == {name}
    ids = prompts()["input_ids"]
    torch.testing.assert_close(base(ids).logits, widened(ids).logits, atol=1e-4, rtol=1e-4)
    assert torch.equal(rows_at(lm_head(base), ids).float(), widened.lm_head.weight[ids])
    assert BaseFingerprint.of(widened).difference(base) is None
    assert "widened" not in capsys.readouterr().err


def test_what_must_be_widened_is_told(tmp_path, capsys):
    matrices = write_model(tmp_path / "tiny.gguf", "llama", Type.Q8_0, Type.Q6_K)
    raw = matrices.read_bytes()
    other = tmp_path / "other.gguf"  # the bytes of Q6_K read as those of IQ3_S and two more: same block
    name = b"blk.1.attn_v.weight"
    at = raw.index(name) + len(name) + 4 + 16
    assert raw[at : at + 4] == int(Type.Q6_K).to_bytes(4, "little")
    other.write_bytes(raw[:at] + int(Type.IQ3_S).to_bytes(4, "little") + raw[at + 4 :])
    base = load_base(other, "auto")
    assert "1 tensor of type IQ3_S, widened to float32: " in capsys.readouterr().err
    assert {"Q6_K", "Q8_0"} < set(packed_bytes(base))


def test_rows_of_the_lm_head_are_those_of_the_file(files):
    for path in (files("llama", "Q4_K_M", is_tied=False), files("qwen2", "Q5_0")):
        widened, base = load_base(path), load_base(path, "auto")
        ids = torch.tensor([[0, 259], [7, 7]])
        assert torch.equal(rows_at(lm_head(base), ids), widened.lm_head.weight[ids])
        assert torch.equal(base.get_input_embeddings()(ids), widened.get_input_embeddings()(ids))


def test_heads_of_the_widened_base_know_the_file_for_the_same_model_and_the_other_way_round(files):
    path = files("llama", "Q4_K_M")
    widened, held = load_base(path), load_base(path, "auto")
    assert BaseFingerprint.of(widened).difference(held) is None
    assert BaseFingerprint.of(held).difference(widened) is None
    rounded = load_base(path)
    with torch.no_grad():  # as four bits round: by less than a tenth
        rounded.lm_head.weight *= 1 + 0.08 * torch.randn_like(rounded.lm_head.weight)
    assert BaseFingerprint.of(held).difference(rounded) is None
    other = load_base(write_model(path.with_name("another.gguf"), seed=9), "auto")
    assert "away from theirs" in BaseFingerprint.of(held).difference(other)


def test_factors_of_rotary_frequencies_in_the_file_are_used(tmp_path, files):
    import gguf
    import numpy as np

    class WithFactors(gguf.GGUFWriter):
        def write_header_to_file(self, *args, **kwargs):
            self.add_tensor("rope_freqs.weight", np.linspace(1, 8, 32).astype(np.float32))
            super().write_header_to_file(*args, **kwargs)

    plain, original = files("llama", "Q4_K_M"), gguf.GGUFWriter
    gguf.GGUFWriter = WithFactors
    try:
        path = write_model(tmp_path / "scaled.gguf")
    finally:
        gguf.GGUFWriter = original
    without, scaled = load_base(plain), load_base(path)
    assert torch.allclose(
        scaled.model.rotary_emb.inv_freq, without.model.rotary_emb.inv_freq / torch.linspace(1, 8, 32)
    )
    assert torch.equal(load_base(path, "auto").model.rotary_emb.inv_freq, scaled.model.rotary_emb.inv_freq)


def test_too_little_memory_is_said_before_anything_is_read(files, monkeypatch):
    monkeypatch.setattr("medusa.engine.weights.plan.available_memory", lambda: 2**20)
    with pytest.raises(
        MemoryError, match=r"takes 0\.\d GB with engine='auto', and 0.0 GB of memory are free"
    ):
        load_base(files(), "auto")


def test_pages_of_the_file_are_given_back(files):
    path = files("llama", "Q4_K_M", num_layers=6)
    base = load_base(path, "auto")
    gc.collect()
    mapped = 0
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.endswith(str(path)):
            mapped += next(int(each.split()[1]) for each in lines if each.startswith("Rss:"))
    assert base is not None and 1024 * mapped < os.path.getsize(path) / 2


def test_a_file_that_is_cut_while_its_embedding_is_read_ends_with_a_sentence(tmp_path):
    path = write_model(tmp_path / "tiny.gguf")
    model = MedusaModel.from_pretrained(path, engine="int8")
    file_rows = model.base.get_input_embeddings().file_rows
    process = os.fork()
    if process == 0:
        faulthandler.enable((tmp_path / "traceback").open("w"))  # pytest's would be shown
        os.dup2(os.open(tmp_path / "stderr", os.O_CREAT | os.O_WRONLY), 2)
        os.truncate(path, 0)
        file_rows[-1].tolist()
        os._exit(0)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGBUS
    said = (tmp_path / "stderr").read_text()
    assert said.startswith("error: a file that this process reads was cut while it was in use")
