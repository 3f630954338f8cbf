"""Candidate trees: which guesses one forward pass verifies, and which guess follows which.

A :class:`CandidateTree` is a shape without tokens; drafters fill it at every step. Node 0 is the root token
(depth 0, always accepted). Every other node stands for "the guess of rank r after its parent's guess", so it
is named by the ranks on its way from the root, its *rank path*: ``(0, 2)`` is the third-best guess of head 2
after the best guess of head 1. :class:`TreeTopology` is such a shape as the tensors that a step reads.
"""

from __future__ import annotations

import heapq
import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from medusa.hardware import sent

RankPath = tuple[int, ...]

MAX_NODES = 4096
"""Largest number of nodes of a tree. Its ancestor mask takes the square of it: 16 MiB, or 40 GB for 200,000
nodes."""


@dataclass(frozen=True)
class CandidateTree:
    """A set of rank paths, in breadth-first order, that has the parent of each, the root ``()`` included.

    Build one with :meth:`from_paths`, :meth:`chain`, or :func:`best_tree`.
    """

    paths: tuple[RankPath, ...]

    def __post_init__(self) -> None:
        _check_num_nodes(len(self.paths))

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> CandidateTree:
        """The tree that holds ``paths``; the root may be left out, order is free.

        Raises:
            ValueError: a rank is no int or negative, a path is named twice, a path's parent is missing, or
                there are more than :data:`MAX_NODES`.
        """
        listed = list(paths)
        _check_num_nodes(len(listed))
        nodes: set[RankPath] = set()
        for ranks in listed:
            path = _rank_path(ranks)
            if path in nodes:
                raise ValueError(f"a tree names each path once, got {_short(path)} more than once")
            nodes.add(path)
        nodes.add(())
        for path in nodes:
            if path and path[:-1] not in nodes:
                raise ValueError(
                    f"every path needs its parent in the tree: {_short(path)} is there, "
                    f"{_short(path[:-1])} is not; add the parent"
                )
        return cls(tuple(sorted(nodes, key=lambda path: (len(path), path))))

    @classmethod
    def chain(cls, depth: int) -> CandidateTree:
        """The best guess of each head in turn: depth + 1 nodes. ``chain(0)`` is plain decoding."""
        if depth < 0:
            raise ValueError(f"depth must be at least 0, got {depth}")
        _check_num_nodes(depth + 1)
        return cls(tuple((0,) * length for length in range(depth + 1)))

    @property
    def num_nodes(self) -> int:
        """N, the root token included."""
        return len(self.paths)

    @property
    def depth(self) -> int:
        """Depth of the deepest node; 0 for only the root."""
        return len(self.paths[-1])

    @property
    def is_chain(self) -> bool:
        """Whether every node is the only child of the one before it."""
        return self.depth == self.num_nodes - 1

    @cached_property
    def width_by_depth(self) -> tuple[int, ...]:
        """How many of the best guesses of head d the tree needs, d = 1 .. depth."""
        widths = [0] * self.depth
        for path in self.paths[1:]:
            widths[len(path) - 1] = max(widths[len(path) - 1], path[-1] + 1)
        return tuple(widths)

    def ancestors(self, node: int) -> list[int]:
        """The nodes from the root to ``node``, itself included."""
        path = self.paths[node]
        return [self.paths.index(path[:depth]) for depth in range(len(path) + 1)]

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Index of each node's parent; the root is its own parent."""
        node_of = {path: node for node, path in enumerate(self.paths)}
        return tuple(node_of[path[:-1]] if path else 0 for path in self.paths)

    def subtree(self, max_depth: int) -> CandidateTree:
        """The nodes no deeper than ``max_depth``."""
        return CandidateTree(tuple(path for path in self.paths if len(path) <= max_depth))

    def topology(self, device: torch.device | str = "cpu") -> TreeTopology:
        """The tree as tensors on ``device``, the same for all rows."""
        parents = sent(self.parents, device)
        depths = sent([len(path) for path in self.paths], device)
        return TreeTopology.from_parents(parents[None], depths[None], self.depth, self.is_chain)


def _check_num_nodes(num_nodes: int) -> None:
    if num_nodes > MAX_NODES:
        raise ValueError(f"a tree holds at most {MAX_NODES} nodes, got {num_nodes}; choose a smaller one")


def _rank_path(path: Sequence[int]) -> RankPath:
    """``path`` as a tuple of ints; ValueError where it is no list of ranks."""
    try:
        ranks = tuple(map(operator.index, path))
    except TypeError as error:
        raise ValueError(f"a path is a list of ranks, which are ints, got {reprlib.repr(path)}") from error
    if ranks and min(ranks) < 0:
        raise ValueError(f"ranks count from 0, got path {_short(ranks)}")
    return ranks


def _short(path: RankPath) -> str:
    return reprlib.repr(list(path))


@dataclass(frozen=True)
class TreeTopology:
    """The shape of a tree as tensors. R is 1 (one tree for all rows) or B (one tree per row)."""

    parents: Tensor  # (R, N) long; the root is its own parent
    depths: Tensor  # (R, N) long
    ancestors: Tensor  # (R, N, N) bool; [i, j]: j is on the path from the root to i, i included
    lineage: Tensor  # (R, N, L) long; [i, j]: the node at depth j on the path to i; i where i is less deep
    is_chain: bool = False  # every node is the only child of the one before it; False also if not known

    @property
    def num_nodes(self) -> int:
        return self.parents.shape[1]

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node; for a tree whose shape changes at every step, an upper bound of it."""
        return self.lineage.shape[2] - 1

    def of_rows(self, rows: Tensor) -> TreeTopology:
        """The trees of ``rows`` (B',) long; itself if all rows share one."""
        if self.parents.shape[0] == 1:
            return self
        return TreeTopology(
            self.parents[rows], self.depths[rows], self.ancestors[rows], self.lineage[rows], self.is_chain
        )

    def first(self, num_nodes: int) -> TreeTopology:
        """The trees of the first ``num_nodes`` nodes, whose parents must be among them."""
        nodes = slice(num_nodes)
        depths = self.depths[:, nodes]
        # On a GPU a bound, since reading the maximum would wait for it.
        deepest = int(depths.max()) if depths.device.type == "cpu" else num_nodes - 1
        return TreeTopology(
            parents=self.parents[:, nodes],
            depths=depths,
            ancestors=self.ancestors[:, nodes, nodes],
            lineage=self.lineage[:, nodes, : deepest + 1],
            is_chain=self.is_chain or num_nodes == 1,
        )

    @classmethod
    def from_parents(
        cls, parents: Tensor, depths: Tensor, max_depth: int, is_chain: bool = False
    ) -> TreeTopology:
        """The topology of trees with parents (R, N) long and depths (R, N) long, parents before children.

        ``is_chain`` is the caller's word: the tensors are not read on the host.
        """
        nodes = torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
        above = [nodes]
        for _ in range(max_depth):
            above.append(parents.gather(1, above[-1]))
        by_distance = torch.stack(above, dim=2)  # (R, N, L): [i, s] is the ancestor s levels above i
        levels = torch.arange(max_depth + 1, device=parents.device)
        distances = (depths[:, :, None] - levels).clamp(min=0)
        lineage = by_distance.gather(2, distances)
        ancestors = torch.zeros(*parents.shape, parents.shape[1], dtype=torch.bool, device=parents.device)
        ancestors.scatter_(2, lineage, True)
        return cls(parents, depths, ancestors, lineage, is_chain)

    @classmethod
    def chain(cls, num_nodes: int, device: torch.device | str, is_draft: bool = False) -> TreeTopology:
        """A chain of ``num_nodes`` tokens, such as a prompt: each attends to all before it.

        ``lineage`` is (1, N, N) if ``is_draft``, else (1, N, 1) to save memory: only acceptance reads it.
        """
        nodes = torch.arange(num_nodes, device=device)[None]
        ancestors = torch.ones(1, num_nodes, num_nodes, dtype=torch.bool, device=device).tril()
        lineage = torch.minimum(nodes[..., None], nodes[:, None]) if is_draft else nodes[..., None]
        return cls((nodes - 1).clamp(min=0), nodes, ancestors, lineage, is_chain=True)


def best_tree(path_value: Mapping[RankPath, float], num_nodes: int) -> CandidateTree:
    """The tree of ``num_nodes`` nodes with the largest sum of node values, which is the expected number of
    accepted tokens.

    ``path_value[path]`` estimates the probability that every guess on ``path`` is right; the root is always
    taken. Values never grow along a path, so taking the node of largest value next, among the children of
    taken nodes, is optimal (Sequoia, arXiv 2402.12374, section 3.1, for values that are products; it holds
    for any values that do not grow). The tree is smaller if ``path_value`` has fewer nodes.
    """
    if num_nodes < 1:
        raise ValueError(f"num_nodes must be at least 1 (the root token), got {num_nodes}")
    children: dict[RankPath, list[RankPath]] = {}
    for path in path_value:
        if path:
            children.setdefault(path[:-1], []).append(path)
    chosen: list[RankPath] = [()]
    frontier = [(-path_value[path], path) for path in children.get((), [])]
    heapq.heapify(frontier)
    while frontier and len(chosen) < num_nodes:
        _, path = heapq.heappop(frontier)
        chosen.append(path)
        for child in children.get(path, []):
            heapq.heappush(frontier, (-path_value[child], child))
    return CandidateTree.from_paths(chosen)


def grown_path_values(
    child_rates: Callable[[RankPath], Sequence[float]], max_paths: int = 4096
) -> dict[RankPath, float]:
    """Path values for :func:`best_tree`, each the product of the rates on its path.

    ``child_rates(path)[r]`` is how often the guess of rank r after ``path`` is right, given that ``path`` is;
    it is empty where the tree must end. Only the ``max_paths`` paths of largest value are kept.
    """
    values: dict[RankPath, float] = {}
    frontier: list[tuple[float, RankPath]] = [(-1.0, ())]
    while frontier and len(values) < max_paths:
        negative, path = heapq.heappop(frontier)
        if path:
            values[path] = -negative
        for rank, rate in enumerate(child_rates(path)):
            if rate > 0:
                heapq.heappush(frontier, (negative * rate, (*path, rank)))
    return values
