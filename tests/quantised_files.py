"""Tiny random models as GGUF files, in each type that weights are quantised to."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from transformers.convert_slow_tokenizer import bytes_to_unicode

TYPES = [
    *(Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.IQ4_NL, Type.IQ4_XS, Type.MXFP4),
    *(Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K),
]
"""The types that are held in their own bits."""
_SCALES = {
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q6_K": [208],
    "Q4_1": [0, 2],
    "Q5_1": [0, 2],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
}
"""Where a block has its float16 numbers; at 0 in the others."""
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EXPERTS = ("qwen3moe", "gpt-oss")
"""Mixtures, of four experts."""
LAYER_NORMS = ("nemotron", "stablelm")
"""Architectures whose norms have biases."""
VOCAB_SIZE = 256 + len(SPECIAL) + 1
"""Each byte, the special tokens, and one word of two bytes."""


def random_rows(
    kind: Type, num_rows: int, num_inputs: int, seed: int = 0, scale: float = 0.003
) -> np.ndarray:
    """Rows of a quantised matrix, (num_rows, bytes) uint8: any codes, with scales that are numbers."""
    rng = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (num_rows, num_inputs // block, size), dtype=np.uint8)
    if kind == Type.MXFP4:
        blocks[..., 0] = rng.integers(117, 122, blocks.shape[:2])
    for start in [] if kind == Type.MXFP4 else _SCALES.get(kind.name, [0]):
        numbers = (rng.standard_normal(blocks.shape[:2]) * scale).astype(np.float16)
        if kind.name.endswith("_K") and kind.name != "Q8_K":
            numbers = (numbers / 16).astype(np.float16)  # times whole scales
        blocks[..., start : start + 2] = numbers.view(np.uint8).reshape(*numbers.shape, 2)
    return blocks.reshape(num_rows, -1)


def write_model(
    path: Path,
    architecture: str = "llama",
    matrices: Type = Type.Q4_K,
    others: Type = Type.Q6_K,
    hidden: int = 256,
    is_tied: bool = True,
    num_layers: int = 2,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
    head_width: int | None = None,
    has_rope_factors: bool = False,
    num_files: int = 1,
    **metadata: object,
) -> Path:
    """A model of ``num_layers`` layers with a tokenizer, and its first file; values and the last matrix of
    each layer are of the type ``others``, as in the mixtures that are called Q4_K_M.

    Args:
        has_rope_factors: with the factors of rotary frequencies that Llama 3.1 has.
    """
    num_tensors = 2 + (not is_tied) + has_rope_factors + 9 * num_layers  # of Llama
    most_tensors = 0 if num_files == 1 else -(-num_tensors // num_files)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=most_tensors)
    is_qwen3 = architecture.startswith("qwen3")  # transformers takes heads of 128 for all of these
    width = head_width or (128 if is_qwen3 else min(hidden // 4, 128))
    heads, intermediate = hidden // width, 2 * hidden
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_block_count(num_layers)
    writer.add_feed_forward_length(intermediate)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads // 2)
    if architecture in LAYER_NORMS:
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(vocab_size)
    if architecture in EXPERTS:
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(intermediate)
    if architecture in ("qwen3", "qwen3moe", "gemma2", "gemma3", "gpt-oss"):
        writer.add_key_length(width)
        writer.add_value_length(width)
    if architecture in ("gemma2", "gemma3", "gpt-oss", "phi3"):
        writer.add_sliding_window(32)
    if architecture in ("phi3", "stablelm", "nemotron"):
        writer.add_rope_dimension_count(width)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(50.0)
        writer.add_final_logit_softcapping(30.0)
    if architecture == "gpt-oss":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(16.0)
        writer.add_rope_scaling_orig_ctx_len(32)
    _add_tokenizer(writer, vocab_size)
    for key, value in metadata.items():
        getattr(writer, f"add_{key}")(value)
    rng = np.random.default_rng(seed)
    seeds = iter(range(seed * 1000 + 1, seed * 1000 + 1000))

    def matrix(name: str, rows: int, columns: int, kind: Type = matrices) -> None:
        if kind in (Type.F32, Type.F16, Type.BF16):
            numbers = (rng.standard_normal((rows, columns)) * 0.05).astype(np.float32)
            writer.add_tensor(name, gguf.quantize(numbers, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, random_rows(kind, rows, columns, next(seeds)), raw_dtype=kind)

    def vector(name: str, size: int, around: float = 1.0) -> None:
        numbers = around + 0.1 * rng.standard_normal(size)
        writer.add_tensor(name, numbers.astype(np.float32))

    def norm(name: str) -> None:
        vector(f"{name}.weight", hidden)
        if architecture in LAYER_NORMS:
            vector(f"{name}.bias", hidden, 0.0)

    def linear(name: str, rows: int, columns: int, kind: Type = matrices, has_bias: bool = False) -> None:
        matrix(f"{name}.weight", rows, columns, kind)
        if has_bias:
            vector(f"{name}.bias", rows, 0.0)

    matrix("token_embd.weight", vocab_size, hidden, others)
    if not is_tied:
        matrix("output.weight", vocab_size, hidden, others)
    norm("output_norm")
    if has_rope_factors:
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 8, width // 2, dtype=np.float32))
    for layer in range(num_layers):
        of = f"blk.{layer}"
        norms = ["attn_norm", "post_attention_norm" if architecture == "gpt-oss" else "ffn_norm"]
        if architecture in ("gemma2", "gemma3"):
            norms += ["post_attention_norm", "post_ffw_norm"]
        for name in norms:
            norm(f"{of}.{name}")
        if architecture in ("qwen3", "qwen3moe", "gemma3"):
            for name in ("attn_q_norm", "attn_k_norm"):
                vector(f"{of}.{name}.weight", width)
        has_bias = architecture in ("qwen2", "gpt-oss")
        if architecture == "phi3":
            linear(f"{of}.attn_qkv", 2 * hidden, hidden)
        else:
            linear(f"{of}.attn_q", hidden, hidden, matrices, has_bias)
            linear(f"{of}.attn_k", hidden // 2, hidden, matrices, has_bias)
            linear(f"{of}.attn_v", hidden // 2, hidden, others, has_bias)
        linear(f"{of}.attn_output", hidden, hidden)
        sizes = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
        if architecture in ("nemotron", "phi3"):
            del sizes["gate"]
        if architecture == "phi3":  # gate and up are one matrix
            sizes["up"] = (2 * intermediate, hidden)
        if architecture not in EXPERTS:
            for name, size in sizes.items():
                linear(f"{of}.ffn_{name}", *size, others if (name, layer) == ("down", 0) else matrices)
            continue
        matrix(f"{of}.ffn_gate_inp.weight", 4, hidden, Type.F32)
        for name, (rows, columns) in sizes.items():
            kind = Type.MXFP4 if architecture == "gpt-oss" else others if name == "down" else matrices
            stacked = random_rows(kind, 4 * rows, columns, next(seeds)).reshape(4, rows, -1)
            writer.add_tensor(f"{of}.ffn_{name}_exps.weight", stacked, raw_dtype=kind)
        if architecture == "gpt-oss":
            vector(f"{of}.attn_output.bias", hidden, 0.0)
            vector(f"{of}.attn_sinks.weight", heads, 0.0)
            vector(f"{of}.ffn_gate_inp.bias", 4, 0.0)
            for name, (rows, _) in sizes.items():
                biases = (0.1 * rng.standard_normal((4, rows))).astype(np.float32)
                writer.add_tensor(f"{of}.ffn_{name}_exps.bias", biases)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if num_files == 1 else path.with_name(f"{path.stem}-00001-of-{num_files:05}.gguf")


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    letter_of = bytes_to_unicode()
    letters = [letter_of[byte] for byte in range(256)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    unused = [f"<unused{index}>" for index in range(vocab_size - VOCAB_SIZE)]
    writer.add_token_list([*letters, *SPECIAL, "th", *unused])
    writer.add_token_types([1] * 256 + [3] * len(SPECIAL) + [1] + [5] * len(unused))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(258)
    writer.add_pad_token_id(256)
    writer.add_chat_template(CHATML)
