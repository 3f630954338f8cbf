"""A small Llama as a GGUF file in float32, without a tokenizer."""

from pathlib import Path

from transformers import LlamaForCausalLM


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
