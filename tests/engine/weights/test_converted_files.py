"""Files of llama.cpp's converter in the engines: no matrix leaves its bits for its order or parts."""

import pytest
import torch
from conftest import needs_kernels
from converted_gguf import VOCAB_SIZE, made, write_converted
from gguf import GGMLQuantizationType as Type

from medusa import MedusaModel
from medusa.base.causal_lm import end_ids
from medusa.drafters.dynamic import DynamicAutoregressiveDrafter
from medusa.engine.weights.load import load_base
from medusa.engine.weights.products import GroupQuantisedMatmul
from medusa.heads import draft_vocab
from medusa.heads.mtp import MtpConfig, MtpHead

pytestmark = needs_kernels
pytest.importorskip("medusa.base.gguf_model", exc_type=ImportError, reason="needs a newer transformers")

PROMPT = torch.randint(3, VOCAB_SIZE, (1, 24), generator=torch.Generator().manual_seed(2))
IN_PARTS = ["Granite 4 H", "Granite 4 H MoE"]
IN_ANOTHER_ORDER = ["Qwen3.5", "SmolLM3"]


@pytest.mark.parametrize("matrices", [Type.Q8_0, Type.Q4_0, Type.BF16], ids=lambda kind: kind.name)
@pytest.mark.parametrize("kind", [*IN_PARTS, *IN_ANOTHER_ORDER, "Gemma 4 E2B"])
def test_a_matrix_in_parts_or_in_another_order_stays_in_the_bits_of_its_file(
    kind, matrices, tmp_path, capsys
):
    path = write_converted(made(kind), kind, tmp_path / "tiny.gguf", matrices=matrices)
    wide = load_base(path, dtype=torch.float32)
    held = load_base(path, "packed")
    assert "widened to float32" not in " ".join(capsys.readouterr().err.split())
    torch.testing.assert_close(held(PROMPT).logits, wide(PROMPT).logits, atol=1e-4, rtol=1e-4)


def test_engines_hold_every_matrix_of_a_file_with_layers_for_multi_token_prediction(tmp_path):
    path = with_mtp(tmp_path)
    for engine in ("auto", "packed", "int8"):
        held = load_base(path, engine)
        quantised = {id(m) for m in held.modules() if isinstance(m, GroupQuantisedMatmul)}
        assert len(quantised) >= 4 * 4, "of each layer: into the mixer, out of it, into the MLP, out of it"
        matrices = [name for name, each in held.named_parameters() if each.dim() == 2 and each.stride(0)]
        assert not matrices


@pytest.mark.parametrize("engine", ["auto", "packed", "eager"])
def test_a_file_drafts_with_its_own_layers_and_its_text_is_the_same(tmp_path, engine):
    path = str(with_mtp(tmp_path))
    model = MedusaModel.from_pretrained(path, heads="default", engine=engine)
    options = {"max_new_tokens": 16, "do_sample": False}
    alone = model.generate(PROMPT, drafter="plain", **options)
    for how in ({}, {"drafter": "mtp"}, {"drafter": "dynamic-heads"}, {"drafter": "heads"}):
        assert torch.equal(model.generate(PROMPT, **how, **options), alone)
    assert model.heads.num_heads == 3 and model.tree.num_nodes == 4


def test_its_own_layers_stay_in_the_bits_of_the_file(tmp_path):
    path = str(with_mtp(tmp_path))
    held, widened = (
        MedusaModel.from_pretrained(path, heads="mtp", engine=engine) for engine in ("packed", "eager")
    )
    products = [each for each in held.heads.modules() if isinstance(each, GroupQuantisedMatmul)]
    assert {each.number_format for each in products} == {"Q8_0"} and len(products) >= 5
    assert not [name for name, each in held.heads.named_parameters() if each.dim() == 2]
    positions = torch.arange(6)[None]
    drafts = [model.heads(*states(), position_ids=positions) for model in (held, widened)]
    torch.testing.assert_close(drafts[0].states, drafts[1].states, atol=0.05, rtol=0.05)


def test_of_a_large_vocabulary_its_own_layers_draft_the_likely_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(draft_vocab, "LIKELY", 40)
    path = str(with_mtp(tmp_path))
    model = MedusaModel.from_pretrained(path, heads="mtp")
    ends = end_ids(model.base)
    assert model.heads.token_map.tolist() == sorted({*range(40), *ends})
    drafted = []
    draft = DynamicAutoregressiveDrafter.draft

    def kept(self, context):
        drafted.append(draft(self, context))
        return drafted[-1]

    monkeypatch.setattr(DynamicAutoregressiveDrafter, "draft", kept)
    options = {"max_new_tokens": 12, "do_sample": False}
    text = model.generate(PROMPT, drafter="dynamic-heads", **options)
    assert torch.equal(text, model.generate(PROMPT, drafter="plain", **options))
    tokens = {int(token) for each in drafted for token in each.tokens[:, 1:].flatten()}
    assert tokens and tokens <= {*range(40), *ends}


def states():
    """Features and embeddings of six entries."""
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(1, 6, 32, generator=generator) for _ in range(2)]


def with_mtp(directory):
    base = made("Qwen3.5")
    base.config.mtp_num_hidden_layers = 1
    base.name_or_path = "made"
    layers = MtpHead(MtpConfig.of_base(base)).layers
    return write_converted(base, "Qwen3.5", directory / "mtp.gguf", layers, matrices=Type.Q8_0)
