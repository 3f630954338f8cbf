"""A small Llama as a GGUF file in float32, without a tokenizer, and vocabularies without a model."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from transformers import LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode


def written_gguf(base: LlamaForCausalLM, path: Path) -> Path:
    """Write the tensors of ``base`` to ``path`` under llama.cpp's names; needs the gguf package."""
    import gguf

    config = base.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_array("tokenizer.ggml.scores", [0.0, 1.0])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in base.state_dict().items():
        for part, num_heads in heads.items():
            if part in name:  # llama.cpp turns neighbouring dimensions, transformers those half a head apart
                weight = weight.view(num_heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


LETTERS = [bytes_to_unicode()[byte] for byte in range(256)]
"""The tokens of single bytes, of a byte-level vocabulary."""


def write_vocabulary(
    path: Path,
    tokens: list[str],
    types: list[int] | None = None,
    merges: Iterable[str] = (),
    pre: str = "default",
    scores: list[float] | None = None,
    architecture: str = "llama",
    templates: Mapping[str, str] | None = None,
    ends: list[int] | None = None,
    **ids: int,
) -> Path:
    """Write a vocabulary and nothing else to ``path``: of bytes, or of characters where it has ``scores``."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("llama" if scores else "gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types or [1] * len(tokens))
    if scores:
        writer.add_token_scores(scores)
    else:
        writer.add_token_merges([*merges])
    for name, template in (templates or {}).items():
        key = "tokenizer.chat_template"
        writer.add_string(key if name == "default" else f"{key}.{name}", template)
    if ends is not None:
        writer.add_array("tokenizer.ggml.eos_token_ids", ends)
    for name, token in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
