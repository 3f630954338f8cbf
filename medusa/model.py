"""MedusaModel: a base model, its heads and a tree, behind ``transformers``' own ``generate`` arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from medusa.base.architecture_check import check_base
from medusa.base.causal_lm import (
    CausalLM,
    embedding_weight,
    hidden_size,
    output_embedding,
    vocab_size,
)
from medusa.base.loading import load_base, load_tokenizer
from medusa.base.requirements import check_is_model
from medusa.choices import StepKind
from medusa.decoding.continuous_batch import BatchLimits, ContinuousBatch
from medusa.decoding.loop import StepResult
from medusa.decoding.pausing import RESTING_MATCH, DraftCost, Pausing
from medusa.decoding.request import check_arguments, decode_request, joined_sequences, with_stop_strings
from medusa.decoding.state import DecodeRequest
from medusa.decoding.statistics import DecodingStatistics, MedusaOutput
from medusa.decoding.step_runners import StepRunners
from medusa.decoding.steps import (
    check_step,
    decode_in_steps,
    missing_for_compiled,
)
from medusa.drafters.heads import drafter_of_heads
from medusa.drafters.plain import PlainDrafter
from medusa.drafters.protocol import Drafter, host_bound_parts
from medusa.drafters.registry import DEFAULT_DRAFTER, DraftersByName
from medusa.drafters.suffix import SuffixDrafter
from medusa.engine import Engine, prepared_base, resolved_engine
from medusa.engine.quick_heads import quick_heads
from medusa.engine.snapshot import Snapshot, alteration_of
from medusa.hardware import device_name
from medusa.heads.adapter import apply_adapter, check_carries, folded
from medusa.heads.checkpoint import HeadsCheckpoint, check_tree_fits, load_heads
from medusa.heads.eagle3 import Heads
from medusa.heads.fingerprint import warn_of_another_base
from medusa.heads.medusa_heads import check_heads_fit
from medusa.hub import HUB_ARGUMENTS
from medusa.trees.candidate_tree import CandidateTree
from medusa.trees.tuned_trees import Runtime, TunedTree, chosen_for, tuned_for


@dataclass(frozen=True)
class _Options:
    """How one call decodes, besides the arguments of ``transformers``; see :meth:`MedusaModel.generate`."""

    seed: Any
    tree: CandidateTree | None
    drafter: Drafter | str | None
    acceptance: str
    step: StepKind | None


class MedusaModel:
    """Decodes with a base model several tokens at a time, and writes what the base alone would have written.

    In float32 the output is token-identical to plain decoding with the same seed, for any heads, any
    tree and any batch. ``acceptance="typical"`` is the exception: it is lossy.
    """

    def __init__(
        self,
        base: CausalLM,
        heads: Heads | None = None,
        tree: CandidateTree | None = None,
        tokenizer: Any = None,
        engine: Engine = "eager",
        tuned: Sequence[TunedTree] = (),
        step: StepKind = "general",
    ):
        check_base(base)
        self.base = base
        """The base model as it was given."""
        self.engine: Engine = engine
        self.step: StepKind = step
        """How decode steps are run, unless a call says otherwise."""
        self.heads = heads
        self._tokenizer = tokenizer
        self._tokenizer_source: tuple[str, dict[str, Any]] = (base.name_or_path, {})
        if heads is not None:
            check_heads_fit(heads.config, hidden_size(base), vocab_size(base), base.name_or_path)
        self.tuned = tuple(tuned)
        """The trees that were timed on this very runtime, by batch size, for every kind of step."""
        self.refresh()
        self._default_tree = self._checked_tree(tree)
        for entry in self.tuned:
            self._checked_tree(entry.tree)

    def refresh(self) -> None:
        """Take the weights of base and heads as they are now: when they were trained, edited, cast or moved.

        Calls refuse to go on with what an engine made of other weights. With ``engine="eager"`` and heads
        without a token map nothing is made of them, and nothing need be refreshed.

        Raises:
            ValueError: the engine cannot run the base as it is now.
        """
        base, heads = self.base, self.heads
        is_eager = resolved_engine(base, self.engine) == "eager"
        runner = prepared_base(base if is_eager else folded(base), self.engine)
        check_step(self.step, runner)
        drafting_heads = heads
        if heads is not None:
            heads.to(device=embedding_weight(output_embedding(base)).device).eval()
            drafting_heads = quick_heads(heads, output_embedding(runner))
        snapshot = self._new_snapshot()
        # all at once from here on: other threads may be in calls
        self.runner = runner
        """The base model as the engine runs it; ``base`` itself when eager."""
        self.drafting_heads: Heads | None = drafting_heads
        """The heads as the engine computes them; ``heads`` itself where it has no quicker way."""
        layers = () if heads is None else heads.reads_layers
        self._runners, self._drafters = StepRunners(self.runner, layers=layers), DraftersByName(self)
        self._draft_costs: dict[tuple[StepKind, int], DraftCost] = {}  # by kind of step and rows
        self._snapshot = snapshot
        self.tuned = tuned_for(self.tuned, self.runtime)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles hold what the model was made of; the engine's part is made anew."""
        given = (
            self.base,
            self.heads,
            self._default_tree,
            self.tokenizer,
            self.engine,
            self.tuned,
            self.step,
        )
        return type(self), given

    @classmethod
    def from_pretrained(
        cls,
        base: str | Path | CausalLM,
        heads: str | Path | HeadsCheckpoint | None = None,
        *,
        tree: CandidateTree | None = None,
        tokenizer: Any = None,
        engine: Engine = "auto",
        step: StepKind = "general",
        **base_kwargs: Any,
    ) -> MedusaModel:
        """Load a base model and its heads, and the adapter that the heads were trained with, if any.

        Heads of joint training belong to the adapted base: it is what ``base`` then is, and the output is
        exactly its own.

        Args:
            base: a path, a hub id, the name of the embedded base (:mod:`medusa.places`), or a model already
                loaded (quantised, sharded, on any device).
            heads: a heads directory, a hub id, or a loaded checkpoint. None decodes plainly. A hub id names a
                revision as ``owner/name@revision``.
            tree: the candidate tree of every call; by default those in the heads directory, chosen by
                :meth:`tree_for`, else a chain.
            tokenizer: by default the base's own; see :attr:`tokenizer`.
            engine: how the base's layers are executed (see :mod:`medusa.engine`).
            step: how decode steps are run (see :mod:`medusa.decoding.steps`).
            base_kwargs: for ``AutoModelForCausalLM.from_pretrained`` (``dtype``, ``device_map``,
                ``revision``, ``trust_remote_code``, ...). ``token``, ``cache_dir`` and ``local_files_only``
                are for the heads too.

        Raises:
            FileNotFoundError: base or heads are neither here nor on the hub; the message says what to do.
            ImportError: the heads come with an adapter and peft is not installed.
            ValueError: heads, adapter and base do not belong together; a base already loaded must carry the
                adapter already: a model that the caller loaded is not changed.
        """
        hub = {key: base_kwargs[key] for key in HUB_ARGUMENTS if key in base_kwargs}
        source = str(base) if isinstance(base, (str, Path)) else None
        if isinstance(base, (str, Path)):
            base = load_base(base, **base_kwargs)
        elif unread := sorted(base_kwargs if heads is None else base_kwargs.keys() - hub.keys()):
            raise ValueError(f"{unread} go with a path or a hub id; this base is already loaded")
        check_is_model(base)
        base.eval()
        if isinstance(heads, (str, Path)):
            heads = load_heads(heads, **hub)
        if isinstance(heads, HeadsCheckpoint) and heads.adapter is not None:
            check_heads_fit(heads.heads.config, hidden_size(base), vocab_size(base), base.name_or_path)
            (check_carries if source is None else apply_adapter)(base, heads.adapter)
        elif isinstance(heads, HeadsCheckpoint):
            warn_of_another_base(heads.fingerprint, base, heads.base_model)
        if heads is None:
            model = cls(base, None, tree, tokenizer, engine, step=step)
        elif not isinstance(heads, HeadsCheckpoint):
            raise TypeError(
                f"heads must be a path, a hub id or a HeadsCheckpoint, got {type(heads).__name__}; "
                "MedusaModel(base, heads) takes the modules themselves"
            )
        elif tree is not None:
            model = cls(base, heads.heads, tree, tokenizer, engine, step=step)
        else:
            model = cls(base, heads.heads, heads.tree, tokenizer, engine, heads.tuned, step)
        if source is not None:
            model._tokenizer_source = (source, base_kwargs)
        return model

    @property
    def device(self) -> torch.device:
        return self.base.device

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that was given, else the one from where the base comes, loaded when first asked for.
        None for a base without a name, as one that was made from a configuration is.

        Raises:
            ValueError: there is no tokenizer.
        """
        home, arguments = self._tokenizer_source
        if self._tokenizer is None and home:
            try:
                self._tokenizer = load_tokenizer(home, **arguments)
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"no tokenizer could be loaded from {str(home)!r}, where the base comes from; "
                    "pass tokenizer= to from_pretrained"
                ) from error
        return self._tokenizer

    @property
    def tree(self) -> CandidateTree:
        """The candidate tree of a single row."""
        return self.tree_for(1)

    @property
    def runtime(self) -> Runtime:
        """Where this model decodes: what a tuned tree must have been timed on to be used."""
        dtype = str(self.base.dtype).removeprefix("torch.")
        return Runtime(device_name(self.device), dtype, resolved_engine(self.base, self.engine))

    def tree_for(self, batch_size: int, step: StepKind | None = None) -> CandidateTree:
        """The candidate tree of a call with ``batch_size`` rows, in steps of kind ``step``, that names none.

        The tree tuned on this device, in this precision, with this engine, as :func:`chosen_for` says; where
        none was tuned here, the default tree. Whichever it is, the tokens are the same.
        """
        tuned = chosen_for(self.tuned, batch_size, step or self.step)
        return self._default_tree if tuned is None else tuned

    def drafter_for(self, batch_size: int, step: StepKind | None = None) -> Drafter:
        """A new drafter as for a call with ``batch_size`` rows, in steps of kind ``step``, that names none.

        That is the one measured fastest for such heads (:data:`medusa.drafters.registry.DEFAULT_DRAFTER`), in
        drafts as large as :meth:`tree_for`; where steps of fixed shape cannot run it, the heads in that tree.
        Without heads, and where the tree tuned for so many rows is the root alone, nothing is drafted.
        """
        kind = step or self.step
        tree = self.tree_for(batch_size, kind)
        if self.heads is not None and tree.depth:
            fastest = self._drafters.drafter(DEFAULT_DRAFTER, batch_size, kind)
            if fastest is not None and (kind == "general" or not host_bound_parts(fastest)):
                return fastest
        return self._heads_in(tree)

    def use_tree(self, tree: CandidateTree) -> None:
        """Decode with ``tree`` from here on, for any number of rows: default and tuned trees are forgotten.

        Raises:
            ValueError: the heads cannot fill it.
        """
        self._default_tree, self.tuned = self._checked_tree(tree), ()
        self._draft_costs.clear()

    @property
    def can_compile(self) -> bool:
        """Whether :meth:`compile` has all that it needs here."""
        return self._runners.compile_passes and missing_for_compiled(self.runner) is None

    @property
    def is_compiled(self) -> bool:
        """Whether the libraries of :meth:`compile` are on disk; false where none are made."""
        if not self.can_compile:
            return False
        runners = self._runners
        drafts = (path for each in self._default_drafters() for path in runners.compiled_draft_paths(each))
        return runners.compiled_path.exists() and all(path.exists() for path in drafts)

    def compile(self) -> float:
        """Have the libraries of ``step="compiled"`` on disk and loaded: the base's pass, and the drafts of
        :meth:`drafter_for` any number of rows. The seconds that this took.

        Raises:
            ValueError: this engine compiles no pass, or something is missing.
        """
        check_step("compiled", self.runner)
        if not self._runners.compile_passes:
            raise ValueError(
                f"engine={self.engine!r} compiles its steps as they first run, and keeps no library; "
                "use engine='packed' or 'int8' on a CPU"
            )
        seconds = self._runners.compiled_pass()[1]
        for drafter in self._default_drafters():
            seconds += self._runners.compiled_drafter(drafter, False, True)[1]
        return seconds

    def _default_drafters(self) -> list[Drafter]:
        """Those of :meth:`drafter_for` compiled steps, for every number of rows that a tree was tuned for."""
        rows = sorted({1, *(entry.batch_size for entry in self.tuned)})
        return [self.drafter_for(num_rows, "compiled") for num_rows in rows]

    def generate(
        self,
        inputs: Tensor | None = None,
        *,
        seed: int | Sequence[int] | Tensor | None = None,
        tree: CandidateTree | None = None,
        drafter: Drafter | str | None = None,
        acceptance: str = "exact",
        step: StepKind | None = None,
        streamer: BaseStreamer | None = None,
        **kwargs: Any,
    ) -> Tensor | MedusaOutput:
        """``transformers``' ``generate``, faster. Takes its arguments and returns what it returns.

        Several threads may call this, :meth:`stream` and ``base`` itself at once, and each gets what it would
        get alone. A drafter, processor or criterion that is passed as an object serves one call at a time.

        Args:
            inputs: prompts (B, T) long, left-padded; or ``input_ids=`` with ``attention_mask=``.
            seed: an int (row r draws from stream seed + r) or one per row; None draws one from torch's
                global generator. Only sampling reads it.
            tree: draft with the heads alone, in this tree; ``CandidateTree.chain(0)`` is plain decoding.
            drafter: another source of candidates than :meth:`drafter_for` so many rows; its name will do
                ("suffix"). Where the text depends on what is drafted (``acceptance``), the heads alone draft
                by default, in :meth:`tree_for` so many rows, or in a chain as deep if the rule takes chains.
                Where neither tree nor drafter is named and the base is float32, guessing pauses for as long
                as it does not pay (:mod:`medusa.decoding.pausing`).
            acceptance: "exact"; "typical", which is LOSSY; or a rule for drafters that sample
                ("token", "block", ...; see ``medusa.acceptance.rules``).
            step: how steps are run, for this call; the tokens are the same.
            streamer: gets the tokens as they are accepted, several at a time; batch size 1.
            kwargs: as in ``transformers`` (``max_new_tokens``, ``do_sample``, ``temperature``,
                ``generation_config``, ``logits_processor``, ``stopping_criteria``, ``stop_strings``, ...).

        Returns:
            sequences (B, T + new) long, or a :class:`MedusaOutput` with ``statistics`` when
            ``return_dict_in_generate=True``.
        """
        options = _Options(seed, tree, drafter, acceptance, step)
        return self._joined(self._prepared(inputs, kwargs), options, streamer)

    def stream(
        self,
        inputs: Tensor | None = None,
        *,
        seed: int | Sequence[int] | Tensor | None = None,
        tree: CandidateTree | None = None,
        drafter: Drafter | str | None = None,
        acceptance: str = "exact",
        step: StepKind | None = None,
        statistics: DecodingStatistics | None = None,
        **kwargs: Any,
    ) -> Iterator[StepResult]:
        """The same tokens as :meth:`generate`, one step at a time; ``statistics`` is filled as it goes.
        With another ``step`` than "general", steps come in bursts on a GPU."""
        options = _Options(seed, tree, drafter, acceptance, step)
        return self._steps(self._prepared(inputs, kwargs), options, statistics)

    def continuous_batch(
        self,
        limits: BatchLimits | None = None,
        *,
        plain: bool = False,
        step: StepKind | None = None,
    ) -> ContinuousBatch:
        """A batch that requests (:meth:`request`) join and leave between steps; see
        :mod:`medusa.decoding.continuous_batch`.

        The drafter and its tree follow the number of rows, and guessing pauses where it does not pay.

        Args:
            limits: what it may hold at once.
            plain: draft nothing; the tokens are the same.
            step: "general", or "compiled" with engine "packed" or "int8".

        Raises:
            ValueError: steps of this kind have one shape for a whole answer.
        """
        kind = step or self.step
        check_step(kind, self.runner)
        heads = None if plain else self.heads
        layers = () if heads is None else heads.reads_layers
        compiled = None
        if kind == "compiled" and self._runners.compile_passes:
            compiled, _ = self._runners.compiled_pass()  # that of the heads too: one library for both
            if not plain:
                self.compile()  # before anybody waits for an answer
        elif kind != "general":
            raise ValueError(
                f"step={kind!r} runs steps of one shape, and a batch that rows join changes its own; use "
                "step='general', or 'compiled' with engine='packed' or 'int8' on a CPU"
            )

        self._check_base()
        runner, snapshot, is_cast = self.runner, self._snapshot, self._is_cast

        def check_base(is_new_request: bool) -> None:
            is_same = self._is_as_begun(snapshot) and self._is_cast == is_cast
            is_same = is_same and (snapshot.is_current or not is_new_request)
            if is_same and is_new_request and runner is not self.base:
                is_same = alteration_of(self.base) is None
            if not is_same:
                raise ValueError(
                    "the base or the heads have changed since this batch was made, or the base is in "
                    "training mode, or torch.autocast was switched, and its keys and values are of what "
                    "they were; make a new one with continuous_batch()"
                )

        def drafter_for(num_rows: int) -> Drafter:
            drafter = PlainDrafter() if plain else self.drafter_for(num_rows, kind)
            return drafter if compiled is None else self._runners.compiled_drafter(drafter, False, True)[0]

        def pausing_for(num_rows: int, drafter: Drafter) -> Pausing | None:
            return self._pausing_of(num_rows, kind, drafter)

        trees = (self._default_tree, *(entry.tree for entry in self.tuned))
        return ContinuousBatch(
            self.runner,
            limits or BatchLimits(),
            drafter_for,
            pausing_for,
            check_base,
            compiled,
            layers,
            needs_features=heads is not None and heads.reads_text,
            max_nodes=1 if plain else max(tree.num_nodes for tree in trees) + 8,
        )

    def request(
        self,
        inputs: Tensor | None = None,
        *,
        seed: int | Sequence[int] | Tensor | None = None,
        num_logprobs: int | None = None,
        **kwargs: Any,
    ) -> DecodeRequest:
        """What :meth:`continuous_batch` takes, from the arguments of :meth:`generate`: (1, T) long inputs.

        ``num_logprobs`` asks for the base's own log-probability of each token, and of so many likeliest ones.
        """
        request = decode_request(self.base, seed=seed, **self._prepared(inputs, kwargs))
        return replace(request, num_logprobs=num_logprobs)

    def decode(
        self,
        base: CausalLM,
        input_ids: Tensor,
        *,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None = None,
        seed: int | Sequence[int] | Tensor | None = None,
        tree: CandidateTree | None = None,
        drafter: Drafter | str | None = None,
        acceptance: str = "exact",
        step: StepKind | None = None,
        **prepared: Any,
    ) -> Tensor | MedusaOutput:
        """The decoding method behind ``base.generate(..., custom_generate=medusa_model.decode)``.

        ``transformers`` hands a decoding method neither ``streamer`` nor ``assistant_model``, and refuses
        ``stop_strings`` there, whatever ``tokenizer`` it was given. :meth:`generate` takes streamers and stop
        strings. Here, bind the streamer: ``custom_generate=partial(model.decode, streamer=streamer)``.
        """
        if base is not self.base:
            raise ValueError("decode belongs to this MedusaModel's own base model, got another one")
        prepared |= {"input_ids": input_ids, "generation_config": generation_config}
        return self._joined(prepared, _Options(seed, tree, drafter, acceptance, step), streamer)

    def _prepared(self, inputs: Tensor | None, arguments: dict[str, Any]) -> dict[str, Any]:
        """What ``transformers``' ``generate`` makes of its arguments for a decoding method."""

        def handed_over(_base: CausalLM, input_ids: Tensor, **rest: Any) -> dict[str, Any]:
            return {"input_ids": input_ids, **rest}

        check_arguments(arguments)
        arguments = with_stop_strings(arguments, self.base, lambda: self.tokenizer)
        return self.base.generate(inputs, custom_generate=handed_over, **arguments)

    def _steps(
        self, prepared: dict[str, Any], options: _Options, statistics: DecodingStatistics | None
    ) -> Iterator[StepResult]:
        """The one way to the decode loop."""
        request = decode_request(self.base, seed=options.seed, acceptance=options.acceptance, **prepared)
        drafter = self._drafter(options, request)
        pausing = self._pausing(options, request, drafter)
        kind, snapshot = options.step or self.step, self._snapshot  # read before what may be newer than it
        steps = decode_in_steps(kind, self._runners, drafter, request, statistics, pausing)
        return self._of_one_model(steps, snapshot)

    def _joined(
        self, prepared: dict[str, Any], options: _Options, streamer: BaseStreamer | None
    ) -> Tensor | MedusaOutput:
        """The steps joined to what ``generate`` returns."""
        input_ids, config = prepared["input_ids"].long(), prepared["generation_config"]
        if streamer is not None and len(input_ids) > 1:
            raise ValueError(f"streamer works with batch size 1, got {len(input_ids)} rows; use stream()")
        statistics = DecodingStatistics()
        steps = self._steps(prepared, options, statistics)
        answers: list[list[int]] = [[] for _ in range(len(input_ids))]
        if streamer is not None:
            streamer.put(input_ids.cpu())
        for result in steps:
            for answer, new in zip(answers, result.tokens, strict=True):
                answer.extend(new)
            if streamer is not None:
                streamer.put(torch.tensor(result.tokens[0]))
        if streamer is not None:
            streamer.end()
        sequences = joined_sequences(input_ids, answers, config)
        if not config.return_dict_in_generate:
            return sequences
        return MedusaOutput(sequences=cast(torch.LongTensor, sequences), statistics=statistics)

    def _new_snapshot(self) -> Snapshot:
        return Snapshot(self.base) if self.heads is None else Snapshot(self.base, self.heads)

    @property
    def _is_cast(self) -> bool:
        """Whether ``torch.autocast`` has the base compute in another precision."""
        return torch.is_autocast_enabled(self.device.type)

    def _is_as_begun(self, snapshot: Snapshot) -> bool:
        return snapshot.is_unwritten and not self.base.training

    def _of_one_model(self, steps: Iterator[StepResult], snapshot: Snapshot) -> Iterator[StepResult]:
        """``steps``, for as long as the base is the one that the answer was begun with."""
        is_cast = self._is_cast
        for result in steps:
            if not self._is_as_begun(snapshot):
                raise ValueError(
                    "the base or the heads have changed while an answer was written (written to, cast, "
                    "moved, replaced, an adapter switched, or set to training), and its keys and values are "
                    "those of the old ones; ask again"
                )
            yield result
            if self._is_cast != is_cast:
                raise ValueError("torch.autocast was switched while an answer was written; ask again")

    def _check_base(self) -> None:
        """Have the base run as it is now; ``auto`` gives way to hooks and patches by itself.

        Raises:
            ValueError: the engine has taken weights or modules that have changed; or the base is in training
                mode.
        """
        if self.base.training:
            raise ValueError(
                "the base is in training mode, in which dropout may change its answers; call eval() on it"
            )
        if self.runner is not self.base and self._is_cast:
            raise ValueError(
                f"torch.autocast has the base compute in another precision, and engine={self.engine!r} keeps "
                "its own; decode outside of autocast, or use engine='eager'"
            )
        if not self._snapshot.is_current:
            if self.runner is self.base and self.drafting_heads is self.heads:  # nothing was made of them
                self._snapshot = self._new_snapshot()
                return
            raise ValueError(
                f"the weights of the base or the heads have changed (written to, cast, moved, replaced or "
                f"set otherwise, or an adapter was switched) since engine={self.engine!r} took them; "
                "call refresh() on this MedusaModel first"
            )
        if self.runner is not self.base and (alteration := alteration_of(self.base)) is not None:
            if self.engine != "auto":
                raise ValueError(
                    f"the base has got {alteration}, which engine={self.engine!r} would not run; remove it, "
                    "or use engine='eager'"
                )
            self.refresh()

    def _drafter(self, options: _Options, request: DecodeRequest) -> Drafter:
        self._check_base()
        tree, drafter, num_rows = options.tree, options.drafter, len(request.tokens)
        if drafter is not None:
            if tree is not None:
                raise ValueError("give tree or drafter, not both: a drafter brings its own tree")
            if isinstance(drafter, str):
                drafter = self._drafters.drafter(drafter, num_rows, options.step or self.step)
            return PlainDrafter() if drafter is None else drafter
        if tree is not None:
            return self._heads_in(self._checked_tree(tree))
        if request.is_exact:
            return self.drafter_for(num_rows, options.step)
        tree = self.tree_for(num_rows, options.step)
        only_chain = request.rule is not None and request.rule.only_chains
        return self._heads_in(CandidateTree.chain(tree.depth) if only_chain else tree)

    def _pausing(self, options: _Options, request: DecodeRequest, drafter: Drafter) -> Pausing | None:
        """What pauses guessing in this call; None where it must not.

        A tree or a drafter that the caller has named is asked at every step. In lower precision a pass over
        several nodes rounds differently, and the text must not depend on how long steps took.
        """
        is_named = options.tree is not None or options.drafter is not None
        if is_named or not request.is_exact:
            return None
        return self._pausing_of(len(request.tokens), options.step or self.step, drafter)

    def _pausing_of(self, num_rows: int, step: StepKind, drafter: Drafter) -> Pausing | None:
        """The same, of so many rows of exact requests that name neither."""
        if self.base.dtype != torch.float32 or drafter.max_depth == 0:
            return None
        cost = self._draft_costs.setdefault((step, num_rows), DraftCost())
        return Pausing(cost, SuffixDrafter(min_match=RESTING_MATCH) if step == "general" else None)

    def _heads_in(self, tree: CandidateTree) -> Drafter:
        """The heads in ``tree``; nothing where there are none, or ``tree`` is the root alone."""
        if self.drafting_heads is None or tree.depth == 0:
            return PlainDrafter()
        return drafter_of_heads(self.drafting_heads, self.runner, tree)

    def _checked_tree(self, tree: CandidateTree | None) -> CandidateTree:
        if tree is None:
            return CandidateTree.chain(0 if self.heads is None else self.heads.num_heads)
        check_tree_fits(tree, self.heads)
        return tree
