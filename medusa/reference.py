"""Medusa decoding in one short file: what everything else here does faster, for batches and for every model.

One row, plain tensors, a base with full attention, and heads that read its last hidden state (and, with
``reads_path``, the draft tokens above). :func:`generate` is the whole algorithm of arXiv 2401.10774 with the
exact acceptance rule. Start reading here. The tests compare the library with it.

Shapes: T tokens of the prompt, S tokens in the cache, N nodes of the candidate tree, M of them at one depth,
D hidden size, V vocabulary, V' tokens that the heads score (V, or fewer with a ``token_map``).
"(N,) long" is a tensor of shape (N,) and dtype torch.long.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from medusa.acceptance.sampling import gumbel_noise
from medusa.base.causal_lm import CausalLM, end_ids, lm_head, vocab_size
from medusa.base.passes import cache_argument
from medusa.drafters.heads import HeadsDrafter
from medusa.heads.medusa_heads import MedusaHeads
from medusa.trees.candidate_tree import CandidateTree


@torch.no_grad()
def generate(
    base: CausalLM,
    heads: MedusaHeads,
    tree: CandidateTree,
    prompt: Tensor,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> tuple[list[int], int]:
    """The answer of ``base`` to ``prompt`` (T,) long, and how many forward passes it took after the prompt.

    The answer is what decoding one token at a time gives, whatever the heads guess: a guess is accepted only
    if it is the token that the base chooses there. To sample, the base takes the argmax of logits plus Gumbel
    noise. The noise is a fixed function of (seed, position), so sampling is as deterministic as greedy
    decoding.
    """
    cache = DynamicCache()
    text = prompt.tolist()
    hidden, logits = forward(base, cache, prompt, torch.arange(len(prompt)), causal_mask(len(prompt)))
    text.append(choose(logits[-1], temperature, seed, len(text)))  # the root token: always right
    hidden = hidden[-1]  # (D,): the root was chosen from its logits
    num_steps = 0
    while not has_ended(text[len(prompt) :], max_new_tokens, end_ids(base)):
        num_committed = len(text) - 1  # all but the root are in the cache
        # 1. Draft: fill the tree. Node 0 is the root token; a node at depth d holds a guess of head d.
        tokens = draft(heads, base, tree, hidden, text, temperature, seed)  # (N,)
        # 2. Verify: one forward pass over all nodes. A node attends to the text, its ancestors and itself.
        depths = torch.tensor([len(path) for path in tree.paths])  # (N,)
        mask = tree_mask(tree, num_committed)  # (N, S + N)
        states, logits = forward(base, cache, tokens, num_committed + depths, mask)  # (N, D), (N, V)
        # 3. Accept: walk down from the root, as long as a child holds the token that the base chooses.
        accepted = [0]
        chosen = choose(logits[0], temperature, seed, len(text))
        while (child := child_with(tree, tokens, accepted[-1], chosen)) is not None:
            accepted.append(child)
            chosen = choose(logits[child], temperature, seed, len(text) + len(accepted) - 1)
        # 4. Commit: keep the cache entries of the accepted nodes, in order, and forget the others.
        keep_nodes(cache, num_committed, accepted)
        text += [*tokens[accepted[1:]].tolist(), chosen]
        hidden = states[accepted[-1]]
        num_steps = num_steps + 1
    return until_end(text[len(prompt) :], max_new_tokens, end_ids(base)), num_steps


def draft(
    heads: MedusaHeads,
    base: CausalLM,
    tree: CandidateTree,
    hidden: Tensor,
    text: list[int],
    temperature: float,
    seed: int,
) -> Tensor:
    """The tokens (N,) long of the tree, whose root is the last token of ``text``.

    The node at path (r1, ..., rd) holds the token of rank rd (0 is the best) of head d, given the state
    ``hidden`` (D,) and, for heads that read their path, the tokens above the node. Above temperature 0 the
    noise with which the base will choose the token is added to the head's scores too, so that head and base
    agree more often (Gumbel coupling, arXiv 2408.07978).
    """
    tokens = torch.zeros(tree.num_nodes, dtype=torch.long)
    tokens[0] = text[-1]
    for depth in range(1, tree.depth + 1):
        nodes = [node for node, path in enumerate(tree.paths) if len(path) == depth]
        # The tokens from the root to each node's parent.
        above = torch.stack([tokens[tree.ancestors(tree.parents[node])] for node in nodes])  # (M, depth)
        states = hidden.expand(len(nodes), -1)  # (M, D)
        scores = heads.logits_of(depth - 1, states, lm_head(base), above)  # (M, V')
        if temperature > 0:
            noise = noise_at(len(text) + depth - 1, seed, vocab_size(base))  # (V,)
            noise = noise if heads.token_map is None else noise[heads.token_map]  # (V',)
            # beta is the head's weight against the noise.
            scores = HeadsDrafter.beta / temperature * scores + noise
        ranks = torch.tensor([[tree.paths[node][-1]] for node in nodes])  # (M, 1)
        best = scores.topk(int(ranks.max()) + 1).indices.gather(1, ranks).squeeze(1)  # (M,), of V'
        tokens[nodes] = best if heads.token_map is None else heads.token_map[best]
    return tokens


def tree_mask(tree: CandidateTree, num_committed: int) -> Tensor:
    """Which cache slots each node attends to, (N, S + N) bool: the text, its ancestors and itself."""
    mask = torch.zeros(tree.num_nodes, num_committed + tree.num_nodes, dtype=torch.bool)
    mask[:, :num_committed] = True
    for node in range(tree.num_nodes):
        mask[node, [num_committed + ancestor for ancestor in tree.ancestors(node)]] = True
    return mask


def causal_mask(length: int) -> Tensor:
    """Which tokens each token of a prompt attends to, (T, T) bool."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def forward(
    base: CausalLM, cache: DynamicCache, tokens: Tensor, positions: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """One forward pass: the input (N, D) of the LM head, and the logits (N, V).

    ``tokens`` (N,) long stand at ``positions`` (N,) long and attend to the cache slots of ``mask``
    (N, S + N) bool. The pass appends their N keys and values to the cache.
    """
    lm_head_inputs: list[Tensor] = []
    hook = lm_head(base).register_forward_pre_hook(lambda _module, args: lm_head_inputs.append(args[0]))
    blocked = torch.zeros(mask.shape, dtype=base.dtype).masked_fill(~mask, torch.finfo(base.dtype).min)
    try:
        output: Any = base(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=blocked[None, None],
            use_cache=True,
            **{cache_argument(base): cache},
        )
    finally:
        hook.remove()
    return lm_head_inputs[0][0], output.logits[0]


def choose(logits: Tensor, temperature: float, seed: int, position: int) -> int:
    """The token at ``position`` of the text: the argmax of logits (V,), plus Gumbel noise above temperature
    0."""
    if temperature == 0:
        return int(logits.argmax())
    return int((logits / temperature + noise_at(position, seed, len(logits))).argmax())


def noise_at(position: int, seed: int, vocab_size: int) -> Tensor:
    """The noise (V,) with which the token at ``position`` of the text is chosen."""
    return gumbel_noise(torch.tensor([seed]), torch.tensor([[position]]), vocab_size)[0, 0]


def child_with(tree: CandidateTree, tokens: Tensor, node: int, token: int) -> int | None:
    """The child of ``node`` that holds ``token``; None where none does."""
    children = (child for child in range(1, tree.num_nodes) if tree.parents[child] == node)
    return next((child for child in children if int(tokens[child]) == token), None)


def keep_nodes(cache: DynamicCache, num_committed: int, nodes: list[int]) -> None:
    """Keep the first ``num_committed`` entries of the cache and those of ``nodes``. Keys are stored after
    their rotary embedding, for the position of their token, so an entry may move to another slot."""
    slots = torch.tensor([*range(num_committed), *(num_committed + node for node in nodes)])
    layers: list[Any] = list(cache.layers)
    for layer in layers:
        layer.keys = layer.keys[:, :, slots]
        layer.values = layer.values[:, :, slots]


def has_ended(answer: list[int], max_new_tokens: int, ends: frozenset[int]) -> bool:
    """Whether ``answer`` is full, or holds one of the tokens ``ends``: its last tokens came in one step."""
    return len(answer) >= max_new_tokens or any(token in ends for token in answer)


def until_end(answer: list[int], max_new_tokens: int, ends: frozenset[int]) -> list[int]:
    """``answer`` cut after ``max_new_tokens`` tokens, or after the first of the tokens ``ends``."""
    for count, token in enumerate(answer[:max_new_tokens], start=1):
        if token in ends:
            return answer[:count]
    return answer[:max_new_tokens]
