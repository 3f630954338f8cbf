"""Drafters by name, and of heads by their kind.

A name is a key of :data:`DRAFTERS`, or several joined by ``+`` (``heads+suffix``), which share one tree.

**Adding a drafter**: a file in this folder with a :class:`medusa.drafters.protocol.Drafter`, and a
:class:`NamedDrafter` in :data:`DRAFTERS`. A kind of heads that is not autoregressive has its drafters in
:func:`drafter_of_heads`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, singledispatch
from typing import Any, Protocol

from transformers import PreTrainedModel

from medusa.acceptance.protocol import independent_chains
from medusa.base.causal_lm import CausalLM, lm_head, lm_head_device
from medusa.base.loading import BaseSource, find_base, load_tokenizer
from medusa.base.profile import BaseProfile
from medusa.drafters.autoregressive import AutoregressiveDrafter
from medusa.drafters.draft_model import (
    DraftModelDrafter,
    LowPrecisionDrafter,
    SelfDrafter,
    check_draft_device,
    check_draft_vocabulary,
    check_same_tokens,
    early_exit,
    low_precision,
)
from medusa.drafters.dynamic import (
    DynamicAutoregressiveDrafter,
    DynamicDrafter,
    DynamicHeadsDrafter,
)
from medusa.drafters.heads import HeadsDrafter
from medusa.drafters.protocol import Drafter, PlainDrafter, not_capturable
from medusa.drafters.suffix import SuffixDrafter
from medusa.drafters.union import UnionDrafter
from medusa.engine.engine_state import apply_engine
from medusa.engine.views import packed_unsupported_reason
from medusa.engine.weights.load import load_base
from medusa.engine.weights.own_head import load_own_head
from medusa.heads.autoregressive_head import AutoregressiveHead
from medusa.heads.checkpoint import HeadsCheckpoint, check_heads_fit, load_heads
from medusa.heads.eagle3 import Eagle3Head
from medusa.heads.fingerprint import warn_of_another_base
from medusa.heads.medusa_heads import MedusaHeads
from medusa.heads.mtp import mtp_unsupported_reason
from medusa.heads.protocol import Heads
from medusa.options import STEPS, DrafterSettings, Engine, StepKind
from medusa.trees.candidate_tree import CandidateTree

DEFAULT_DRAFT_LENGTH = 4
MAX_OPTIONAL_NODES = 12
"""Nodes that the default may verify beyond its tree, where text is copied."""


def tree_of(settings: DrafterSettings, default_length: int = DEFAULT_DRAFT_LENGTH) -> CandidateTree:
    """The tree of a drafter without its own: a chain, or ``draft_width`` independent chains."""
    length = settings.draft_length or default_length
    if settings.draft_width > 1:
        return independent_chains(settings.draft_width, length)
    return CandidateTree.chain(length)


@singledispatch
def drafter_of_heads(heads: Heads, base: CausalLM, tree: CandidateTree, is_dynamic: bool = False) -> Drafter:
    """The drafter for heads of any kind on ``base``: it fills ``tree``, or dynamic trees of its size.

    Raises:
        ValueError: the heads cannot fill ``tree``.
        TypeError: no drafter is registered for their kind.
    """
    raise TypeError(f"heads of kind {heads.kind!r} have no drafter; register one for {type(heads).__name__}")


@drafter_of_heads.register
def _of_medusa_heads(
    heads: MedusaHeads, base: CausalLM, tree: CandidateTree, is_dynamic: bool = False
) -> Drafter:
    drafter = DynamicHeadsDrafter if is_dynamic else HeadsDrafter
    return drafter(heads, lm_head(base), tree)


@drafter_of_heads.register
def _of_autoregressive_head(
    head: AutoregressiveHead, base: CausalLM, tree: CandidateTree, is_dynamic: bool = False
) -> Drafter:
    drafter = DynamicAutoregressiveDrafter if is_dynamic else AutoregressiveDrafter
    return drafter(head, base, tree)


class DraftHost(Protocol):
    """The interface of a drafter's model: :class:`medusa.MedusaModel`, or its executor."""

    @property
    def base(self) -> CausalLM:
        """The base model as it was given."""

    @property
    def engine_base(self) -> CausalLM:
        """The base model as the engine runs it."""

    @property
    def profile(self) -> BaseProfile:
        """The facts about the base."""

    @property
    def engine(self) -> Engine:
        """How the base's layers are executed."""

    @property
    def heads(self) -> Heads | None:
        """The heads in use."""

    @property
    def optimized_heads(self) -> Heads | None:
        """The heads as the engine computes them."""

    @property
    def tokenizer(self) -> Any:
        """The base's tokenizer; None where it has none."""

    def step_for(self, step: StepKind | None = None) -> StepKind:
        """How the steps run of a call that asks for ``step``, or for nothing."""

    def tree_for(self, batch_size: int, step: StepKind | None = None) -> CandidateTree:
        """The model's tree for ``batch_size`` rows, in steps of kind ``step`` or its own."""


@dataclass(frozen=True)
class NamedDrafter:
    """A drafter that a user can ask for."""

    name: str
    make: Callable[[DraftHost, DrafterSettings], Drafter]
    """Makes the drafter, with a tree of its own; slow work is done here, once. Others are derived by
    ``with_tree``."""
    missing_requirement: Callable[[DraftHost, DrafterSettings], str | None] = lambda host, settings: None
    """The missing requirement, and its flag; None when the drafter can work."""
    needs_heads: bool = False
    """Whether it drafts with the heads of the model, which must then be loaded, and in the model's trees."""


def _how_to_give(setting: str) -> str:
    """The advice to give ``setting``, in Python and from the shell."""
    return f"give {setting}= to make_drafter (--{setting.replace('_', '-')})"


def _heads(host: DraftHost, settings: DrafterSettings, is_dynamic: bool = False) -> Drafter:
    """The heads of the model, in a chain as long as ``settings`` say, or one node for each head."""
    heads = host.optimized_heads
    base = host.engine_base
    assert heads is not None, "refused before"
    chain = CandidateTree.chain(min(settings.draft_length or heads.num_heads, heads.num_heads))
    return drafter_of_heads(heads, base, chain, is_dynamic)


def _missing_heads(host: DraftHost, settings: DrafterSettings) -> str | None:
    return "heads, and the model was loaded without; give heads= (--heads)" if host.heads is None else None


def _eagle3(host: DraftHost, settings: DrafterSettings) -> AutoregressiveDrafter:
    """The EAGLE-3 head of ``settings.eagle3``, in the tree that its directory holds."""
    assert settings.eagle3 is not None, "refused before"
    source = settings.eagle3
    checkpoint = source if isinstance(source, HeadsCheckpoint) else load_heads(source)
    head = checkpoint.heads
    base = host.engine_base
    if not isinstance(head, Eagle3Head):
        raise ValueError(
            f"eagle3 must be an EAGLE-3 head, got heads of kind {head.kind!r} for "
            f"{checkpoint.base_model!r}; give them as heads= (--heads)"
        )
    check_heads_fit(head, base)
    warn_of_another_base(checkpoint.fingerprint, host.base, checkpoint.base_model)
    head.to(lm_head_device(base)).eval()
    tree = checkpoint.tree
    if tree is None or not tree.depth:
        tree = tree_of(settings, head.num_heads)
    return AutoregressiveDrafter(head, base, tree)


def _missing_eagle3(host: DraftHost, settings: DrafterSettings) -> str | None:
    return None if settings.eagle3 is not None else f"an EAGLE-3 head; {_how_to_give('eagle3')}"


def _mtp(host: DraftHost, settings: DrafterSettings) -> AutoregressiveDrafter:
    """The layers that come with the base, as deep as they are many unless ``settings`` say otherwise."""
    head = load_own_head(host.base, settings.draft_length)
    return AutoregressiveDrafter(
        head.to(host.profile.device).eval(), host.engine_base, tree_of(settings, head.num_heads)
    )


def _draft_model(host: DraftHost, settings: DrafterSettings) -> DraftModelDrafter:
    """The model of ``settings.draft_model``, loaded beside the base in its precision, checked to share its
    tokens."""
    draft_model: Any = settings.draft_model
    if not isinstance(draft_model, PreTrainedModel):
        source = find_base(draft_model)
        if host.tokenizer is not None:
            check_same_tokens(host.tokenizer, load_tokenizer(source))
        draft_model = _loaded_beside(host, source)
    check_draft_vocabulary(host.base, draft_model)
    check_draft_device(host.base, draft_model)
    return DraftModelDrafter(draft_model, host.profile.vocab_size, tree_of(settings))


def _loaded_beside(host: DraftHost, source: BaseSource) -> CausalLM:
    """The model at ``source`` as the base of ``host`` runs: its engine, its precision, its device."""
    model = load_base(source, host.engine, host.profile.device, host.base.dtype)
    return apply_engine(model, host.engine)


def _missing_draft_model(host: DraftHost, settings: DrafterSettings) -> str | None:
    if settings.draft_model is not None:
        return None
    return f"a smaller model of the same family; {_how_to_give('draft_model')}"


def _missing_exit_layer(host: DraftHost, settings: DrafterSettings) -> str | None:
    if settings.exit_layer is not None:  # there is no good default
        return None
    num_layers = host.base.config.get_text_config(decoder=True).num_hidden_layers
    return f"a number of layers, 1 to {num_layers - 1} for this base; {_how_to_give('exit_layer')}"


def _early_exit(host: DraftHost, settings: DrafterSettings) -> SelfDrafter:
    assert settings.exit_layer is not None, "refused before"
    return SelfDrafter(early_exit(host.engine_base, settings.exit_layer), tree_of(settings))


DRAFTERS: dict[str, NamedDrafter] = {
    named.name: named
    for named in (
        NamedDrafter("heads", _heads, _missing_heads, needs_heads=True),
        NamedDrafter("dynamic-heads", partial(_heads, is_dynamic=True), _missing_heads, needs_heads=True),
        NamedDrafter(
            "suffix", lambda host, settings: SuffixDrafter(settings.draft_length or SuffixDrafter().length)
        ),
        NamedDrafter("eagle3", _eagle3, _missing_eagle3),
        NamedDrafter("mtp", _mtp, lambda host, settings: mtp_unsupported_reason(host.base)),
        NamedDrafter("draft-model", _draft_model, _missing_draft_model),
        NamedDrafter("early-exit", _early_exit, _missing_exit_layer),
        NamedDrafter(
            "low-precision",
            lambda host, settings: LowPrecisionDrafter(low_precision(host.base), tree_of(settings)),
            lambda host, settings: packed_unsupported_reason(host.base),
        ),
        NamedDrafter("plain", lambda host, settings: PlainDrafter()),
    )
}
"""Every drafter that a user can ask for by name."""
DEFAULT_DRAFTER = "dynamic-heads+suffix"
"""The default drafter: measured faster than heads without suffix matching, on repetitive text and on other
text."""


def part_names(name: str) -> list[str]:
    """The parts of ``name``: itself, or the parts of a union.

    Raises:
        ValueError: a part is unknown, named twice, or "plain".
    """
    parts = name.split("+")
    for part in parts:
        if part not in DRAFTERS:
            raise ValueError(
                f"drafter {part!r} is unknown; there are {', '.join(DRAFTERS)}, and unions such as "
                "heads+suffix"
            )
    if len(set(parts)) < len(parts) or ("plain" in parts and len(parts) > 1):
        raise ValueError(
            f"a union names each drafter once, and not 'plain', which proposes nothing; got {name!r}"
        )
    return parts


def uses_model_heads(name: str) -> bool:
    """Whether the drafter called ``name``, or a part of the union, needs the heads of the model.

    Raises:
        ValueError: a part is unknown, named twice, or "plain".
    """
    return any(DRAFTERS[part].needs_heads for part in part_names(name))


@dataclass(frozen=True)
class DraftCall:
    """The part of a call that concerns its drafter."""

    num_rows: int
    step: StepKind | None = None
    """None is the model's own kind."""
    drafter: Drafter | str | None = None
    tree: CandidateTree | None = None
    is_exact: bool = True
    """Whether the text does not depend on the drafts."""
    only_chains: bool = False
    """Whether the acceptance rule walks one path."""
    has_references: bool = False
    """Whether a prediction or a corpus is given, which drafts can be copied from."""


class DrafterFactory:
    """Makes the drafters of one model by name; slow work, such as loading a model, is done once."""

    def __init__(self, host: DraftHost, settings: DrafterSettings | None = None):
        self._host = host
        self._settings = settings or DrafterSettings()
        self._originals: dict[str, Drafter] = {}  # by name; see `_original`

    def available(self) -> list[str]:
        """The names that work with this model and these settings, plain decoding left out."""
        return [
            named.name
            for named in DRAFTERS.values()
            if named.name != "plain" and not named.missing_requirement(self._host, self._settings)
        ]

    def choose(self, call: DraftCall) -> Drafter:
        """The drafter of a call.

        ========  =====  ======  ==============================================================
        drafter=  tree=  rule    who drafts
        ========  =====  ======  ==============================================================
        object    none   any     this drafter
        object    given  any     this drafter, in this tree
        name      any    any     the drafter of this name, in this tree or its own
        none      none   exact   :meth:`default`
        none      none   others  the heads in the model's tree, or in a chain of its depth where
                                 the rule takes only chains; nobody without heads
        none      given  any     the heads, in this tree
        ========  =====  ======  ==============================================================

        Nobody drafts in a tree of one node, be it the call's or the one tuned for this number of rows.

        Raises:
            ValueError: as :meth:`make`.
        """
        name = call.drafter
        tree = call.tree
        step = call.step
        if name is not None and not isinstance(name, str):
            if tree is None:
                return name
            return name.with_tree(tree) if tree.depth else PlainDrafter()
        only_chain = call.only_chains and tree is None
        if name is None and tree is None:
            if call.is_exact:
                return self.default(call.num_rows, step, call.has_references)
            if self._host.heads is None:
                return PlainDrafter()
            if only_chain:
                tree = CandidateTree.chain(self._host.tree_for(call.num_rows, step).depth)
        name = name or "heads"
        if tree is None and self._is_idle(name, call.num_rows, step):
            return PlainDrafter()
        return self.make(name, tree, num_rows=call.num_rows, step=step, only_chain=only_chain)

    def make(
        self,
        name: str,
        tree: CandidateTree | None = None,
        *,
        num_rows: int = 1,
        step: StepKind | None = None,
        only_chain: bool = False,
    ) -> Drafter:
        """A new drafter called ``name``, whose parts all fill ``tree``.

        Without a tree the heads draft in the model's own for ``num_rows`` rows and this ``step``, and the
        others in theirs. Parts that use the model's tree are dropped when that tree has one node.
        ``only_chain`` is for rules that walk one path ("token", "block").

        Raises:
            ValueError: no such drafter (the message lists those there are), or it lacks something, or it
                cannot fill ``tree``.
        """
        parts = part_names(name)
        if tree is not None and tree.depth == 0:
            return PlainDrafter()
        for part in parts:
            self._original(part)  # refused, if at all, before anything is drafted
        heads_tree = tree
        if tree is None and not only_chain:
            model_tree = self._host.tree_for(num_rows, step)
            heads_tree = model_tree if model_tree.depth else None
        if heads_tree is None and not only_chain:  # heads do not pay for this number of rows
            parts = [part for part in parts if not DRAFTERS[part].needs_heads] or parts
        drafters = []
        for part in parts:
            original = self._original(part)
            part_tree = heads_tree if DRAFTERS[part].needs_heads else tree
            if only_chain and part_tree is None and original.max_depth:
                part_tree = CandidateTree.chain(original.max_depth)
            drafters.append(original.with_tree(part_tree))
        return _joined(drafters)

    def _is_idle(self, name: str, num_rows: int, step: StepKind | None) -> bool:
        """Whether ``name`` drafts nothing: only heads, with a tuned tree of one node for ``num_rows``
        rows."""
        only_heads = all(DRAFTERS[part].needs_heads for part in part_names(name))
        return only_heads and self._host.heads is not None and not self._host.tree_for(num_rows, step).depth

    def default(self, num_rows: int, step: StepKind | None = None, has_references: bool = False) -> Drafter:
        """The fastest measured drafter, :data:`DEFAULT_DRAFTER`; the plain heads where steps of fixed shape
        cannot run it. Without heads: suffix matching. With a tuned tree of one node: suffix matching if there
        are reference texts, else no drafting."""
        host = self._host
        if host.heads is None:
            return self.make("suffix")
        if not host.tree_for(num_rows, step).depth:
            return self.make("suffix") if has_references else PlainDrafter()
        fastest = self.make(DEFAULT_DRAFTER, num_rows=num_rows, step=step)
        if not STEPS[host.step_for(step)].has_any_shape:
            return self.make("heads", num_rows=num_rows, step=step) if not_capturable(fastest) else fastest
        if isinstance(fastest, DynamicDrafter):
            return fastest.with_suffix(fastest.suffix_length, MAX_OPTIONAL_NODES)
        return fastest

    def _original(self, part: str) -> Drafter:
        """The instance from which all others called ``part`` are derived."""
        missing = DRAFTERS[part].missing_requirement(self._host, self._settings)
        if missing:
            raise ValueError(f"drafter {part!r} needs {missing}")
        if part not in self._originals:
            self._originals[part] = DRAFTERS[part].make(self._host, self._settings)
        return self._originals[part]


def _joined(drafters: list[Drafter]) -> Drafter:
    """One drafter of several: dynamic heads take suffix matching into their tree, all others stand side by
    side."""
    dynamic = next((drafter for drafter in drafters if isinstance(drafter, DynamicDrafter)), None)
    suffix = next((drafter for drafter in drafters if isinstance(drafter, SuffixDrafter)), None)
    if dynamic is not None and suffix is not None:
        rest = [drafter for drafter in drafters if drafter not in (dynamic, suffix)]
        drafters = [dynamic.with_suffix(suffix.length), *rest]
    return UnionDrafter(drafters) if len(drafters) > 1 else drafters[0]
