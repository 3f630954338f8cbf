"""A chat model small enough for tests: byte-level tokenizer, chat template, random Llama, random heads."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from medusa import CandidateTree, HeadsCheckpoint, HeadsConfig, MedusaHeads, MedusaModel, save_heads

SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOL_TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}"
    "<tool_call>{...}</tool_call><|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template that knows tools."""
HIDDEN_SIZE, VOCAB_SIZE = 32, 256 + len(SPECIAL)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that most characters outside ASCII take several."""
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    wrapped.chat_template = TEMPLATE
    return wrapped


def chat_base(seed: int = 0, context: int = 512) -> LlamaForCausalLM:
    """A random Llama over that tokenizer."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        eos_token_id=256,
        pad_token_id=256,
        bos_token_id=None,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def chat_heads(num_heads: int = 3, seed: int = 1) -> MedusaHeads:
    """Random heads, so that some guesses hit and most miss."""
    torch.manual_seed(seed)
    heads = MedusaHeads(HeadsConfig(hidden_size=HIDDEN_SIZE, vocab_size=VOCAB_SIZE, num_heads=num_heads))
    for block in heads.blocks:
        torch.nn.init.normal_(block[0].linear.weight, std=0.2)
    return heads.eval()


def perfect_heads(num_heads: int = 1) -> MedusaHeads:
    """Heads that read their path; every block is the identity, so head d repeats the base's own guess."""
    return MedusaHeads(HeadsConfig(HIDDEN_SIZE, VOCAB_SIZE, num_heads, reads_path=True)).eval()


def wide_tree(depth: int = 3, width: int = 4) -> CandidateTree:
    """``width`` guesses for depth 1, each continued by the best guesses."""
    return CandidateTree.from_paths(
        [(rank, *(0,) * below) for rank in range(width) for below in range(depth)]
    )


def chat_model(seed: int = 0, context: int = 512) -> MedusaModel:
    """All of it in memory."""
    return MedusaModel(chat_base(seed, context), chat_heads(), wide_tree(), chat_tokenizer())


def tool_model(template: str = TOOL_TEMPLATE) -> MedusaModel:
    """The same with room for tools, which its template shows."""
    model = chat_model(context=2048)
    model.tokenizer.chat_template = template
    return model


def save_chat_model(directory: Path) -> tuple[str, str]:
    """All of it on disk: the base's directory and the heads'."""
    base, heads = directory / "base", directory / "heads"
    chat_base().save_pretrained(base)
    chat_tokenizer().save_pretrained(base)
    save_heads(HeadsCheckpoint(chat_heads(), base_model=str(base), tree=wide_tree()), heads)
    return str(base), str(heads)
