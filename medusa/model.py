"""MedusaModel: the public interface to decoding. It holds a base model, its heads and its trees; ``generate``
takes the arguments of ``transformers``' ``generate``."""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from medusa.assets import DEFAULT_HEADS
from medusa.base.architecture_check import check_base, check_is_model
from medusa.base.causal_lm import CausalLM, lm_head_device, vocab_size
from medusa.base.known_models import digest_of_files, heads_that_fit, learning_place
from medusa.base.loading import BaseSource, find_base, load_tokenizer
from medusa.base.pooling import Pooling
from medusa.base.profile import BaseProfile
from medusa.decoding.batch import Batch, BatchLimits, StepResult, decode
from medusa.decoding.executor import Call, Executor, reads_features, trees_of
from medusa.decoding.pooled_states import PooledStates
from medusa.decoding.prefix_cache import PrefixCache
from medusa.decoding.prefix_store import PrefixStore, prefix_home
from medusa.decoding.request import check_arguments, decode_request, joined_sequences, with_stop_strings
from medusa.decoding.state import DecodeRequest
from medusa.decoding.statistics import DecodingStatistics, MedusaOutput
from medusa.drafters.protocol import Drafter
from medusa.drafters.references import References, SuffixCorpus, references_of
from medusa.drafters.registry import DrafterFactory
from medusa.engine.identity import identity_of
from medusa.engine.weights.load import load_base
from medusa.engine.weights.own_head import load_own_heads
from medusa.hardware import release_threads
from medusa.heads.checkpoint import (
    OWN_HEADS,
    HeadsCheckpoint,
    check_heads_fit_source,
    load_heads,
)
from medusa.heads.mtp import can_draft_itself
from medusa.heads.protocol import Heads
from medusa.hub import HUB_ARGUMENTS
from medusa.learning.idle_learning import IdleLearning
from medusa.options import STEPS, DrafterSettings, Engine, StepKind, check_read_by
from medusa.trees.candidate_tree import CandidateTree
from medusa.trees.tuned_trees import Runtime, TunedTree


@dataclass(frozen=True)
class CallOptions:
    """How one call decodes, besides the arguments of ``transformers``; see :meth:`MedusaModel.generate`.

    ``generate``, ``stream`` and ``decode`` write them out, for editors and for ``transformers``, which reads
    the signature of a decoding method.
    """

    seed: int | Sequence[int] | Tensor | None = None
    tree: CandidateTree | None = None
    drafter: Drafter | str | None = None
    acceptance: str = "exact"
    step: StepKind | None = None
    prediction: Any = None
    corpus: SuffixCorpus | None = None


class MedusaModel:
    """Decodes several tokens per forward pass, and returns exactly the tokens of plain decoding with the base
    model.

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
        step: StepKind = "auto",
    ):
        check_base(base)
        self.base = base
        """The base model as it was given."""
        self.engine: Engine = engine
        self.step: StepKind = step
        """How decode steps are run, unless a call says otherwise."""
        self.heads = heads
        self.learning: IdleLearning | None = None
        """What :meth:`learn` has started."""
        self.prefixes: PrefixCache | None = None
        """What :meth:`keep_prefixes` keeps."""
        self._changing = threading.RLock()  # held while a call plans, and while heads are exchanged
        self._running: set[object] = set()  # something for each call from which is learned
        self._tokenizer = tokenizer
        self._tokenizer_source: str | BaseSource = base.name_or_path
        self._trees = trees_of(heads, tree, tuned)  # of all runtimes
        self.refresh()

    def refresh(self) -> None:
        """Take over the current weights of base and heads, after they were trained, edited, cast or moved.

        An engine that holds a copy of the weights refuses calls until then. With ``engine="eager"`` this is
        called automatically.

        Raises:
            ValueError: the engine cannot run the base as it is now.
        """
        executor = Executor(self.base, self.heads, self.engine, self._trees, lambda: self.tokenizer)
        executor.check(self.step)
        self._executor = executor
        release_threads()

    def use_heads(self, checkpoint: HeadsCheckpoint) -> None:
        """Draft with other heads, in their trees, from here on; calls that have begun go on with theirs. The
        tokens are the same.

        Raises:
            ValueError: they do not fit the base, or came with an adapter.
        """
        self.prepared_heads(checkpoint)()

    def prepared_heads(self, checkpoint: HeadsCheckpoint) -> Callable[[], None]:
        """The part of :meth:`use_heads` that takes time; the function that it returns does the rest at
        once."""
        if checkpoint.adapter is not None:
            raise ValueError(
                "the heads came with an adapter, which changes the text of the base; load both by "
                "from_pretrained"
            )
        checkpoint.fit_to(self.base, is_shared=True)
        heads = checkpoint.heads
        trees = trees_of(heads, checkpoint.tree, checkpoint.tuned)
        executor = self._current_executor().with_heads(heads, trees)

        def take() -> None:
            with self._changing:
                self.heads = heads
                self._trees = trees
                self._executor = executor
            release_threads()

        return take

    def learn(self, options: Sequence[str] = (), follow: bool = True) -> IdleLearning:
        """Keep what :meth:`generate` and :meth:`stream` write from here on, on this machine, and have the
        base learn heads from it in a process of its own while no call runs. Better heads are taken into use
        between calls; the tokens are the same. ``medusa heads`` lists them.

        Args:
            options: for ``medusa learn``, such as ``["--tokenizer", name]``.
            follow: take better heads into use here; else those that the model has stay.

        Raises:
            ValueError: the base is in no file by which it would be known again, or has no tokenizer.
            BlockingIOError: another process learns for it now.
        """
        name = self.base.name_or_path
        if self.tokenizer is None:
            raise ValueError("learn needs a tokenizer; pass tokenizer= to from_pretrained")
        learned = learning_place(name)
        if not learned.base:
            with learned.locked():
                learned.begin(name, self.tokenizer.chat_template is not None)
        model = weakref.ref(self)

        def is_busy() -> bool:
            alive = model()
            return alive is not None and bool(alive._running)

        def take(directory: Path) -> None:
            alive = model()
            if alive is not None:
                alive.use_heads(load_heads(directory))

        words = [sys.executable, "-m", "medusa", "learn", name, "--collected", *options]
        self.learning = IdleLearning(learned, self.tokenizer, words, follow, is_busy, take)
        weakref.finalize(self, self.learning.close)
        self.learning.start()
        return self.learning

    def prefix_store(self, max_bytes: int, plain: bool = False) -> PrefixStore | None:
        """The store on disk of texts that this model has read; None where there can be none: ``max_bytes``
        is 0, the base is in no files, has an adapter or keeps a state, or the cache cannot be written.

        Args:
            max_bytes: bytes on the disk, of all models together.
            plain: for a batch without heads.
        """
        files = digest_of_files(self.base.name_or_path) if max_bytes and self.base.name_or_path else None
        if files is None or self.profile.keeps_state or getattr(self.base, "peft_config", None):
            return None
        keeps_features = reads_features(None if plain else self.heads)
        identity = identity_of(files, self.engine_base, self.step, keeps_features)
        try:
            return PrefixStore(prefix_home() / identity, max_bytes)
        except OSError as error:
            warnings.warn(f"prefixes are not stored on disk: {error}", stacklevel=2)
            return None

    def keep_prefixes(self, max_bytes: int, store: PrefixStore | None = None) -> None:
        """Keep what general and compiled steps read for calls with one row, in memory and perhaps in
        ``store``: a call that begins like an earlier one, such as the next turn of a conversation, reads only
        the rest. The tokens are the same."""
        self.prefixes = PrefixCache(max_bytes, store)
        if store is not None:
            weakref.finalize(self, store.close)

    def _current_executor(self) -> Executor:
        """The executor, made anew where base or heads have changed and no engine holds a copy of them."""
        if not self._executor.state.is_current():
            self.refresh()
        return self._executor

    @property
    def engine_base(self) -> CausalLM:
        """The base model as the engine runs it; ``base`` itself when eager."""
        return self._executor.engine_base

    @property
    def profile(self) -> BaseProfile:
        """The facts about the base on which the way of running depends."""
        return self._executor.profile

    @property
    def optimized_heads(self) -> Heads | None:
        """The heads as the engine computes them; ``heads`` itself where it has no faster way."""
        return self._executor.optimized_heads

    @property
    def runtime(self) -> Runtime:
        """Device, dtype and engine of this model, by which it takes its tuned trees."""
        return self._executor.state.runtime

    @property
    def tuned(self) -> tuple[TunedTree, ...]:
        """The tuned trees that this runtime takes (see :func:`medusa.trees.tuned_trees.for_runtime`)."""
        return self._executor.trees.tuned

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles hold the constructor's arguments; the engine's part is built again."""
        arguments = (
            self.base,
            self.heads,
            self._trees.default,
            self.tokenizer,
            self.engine,
            self._trees.tuned,
            self.step,
        )
        return type(self), arguments

    @classmethod
    def from_pretrained(
        cls,
        base: str | Path | CausalLM,
        heads: str | Path | HeadsCheckpoint | None = None,
        *,
        tree: CandidateTree | None = None,
        tokenizer: Any = None,
        engine: Engine = "auto",
        step: StepKind = "auto",
        learn: bool = False,
        **base_kwargs: Any,
    ) -> MedusaModel:
        """Load a base model and its heads, and the adapter that the heads were trained with, if any.

        Heads of joint training come with an adapter. Then :attr:`base` is the base with this adapter, and the
        output is exactly that model's.

        Args:
            base: a path, a hub id, the name of the embedded base (:mod:`medusa.assets`), or a model already
                loaded (quantised, sharded, on any device).
            heads: a heads directory, a hub id, or a loaded checkpoint; "mtp" are the base's own layers for
                multi-token prediction, "default" the heads that ship for the base, else its own layers.
                Without heads, drafts come from suffix matching. A hub id may name a revision,
                ``owner/name@revision``.
            tree: the candidate tree of every call; by default a tree of the heads directory, chosen by
                :meth:`tree_for`, else a chain.
            tokenizer: by default the base's own; see :attr:`tokenizer`.
            engine: how the base's layers are executed (see :mod:`medusa.engine`).
            step: how decode steps are run (see :mod:`medusa.decoding.executor`).
            learn: learn heads from what is written: see :meth:`learn`. Heads that are named stay in use.
            base_kwargs: for ``AutoModelForCausalLM.from_pretrained`` (``dtype``, ``device_map``,
                ``revision``, ``trust_remote_code``, ...). ``token``, ``cache_dir`` and ``local_files_only``
                are for the heads too. Without a GPU, and without ``dtype`` or ``device_map``, the base is
                loaded in float32.

        Raises:
            FileNotFoundError: base or heads are neither here nor on the hub; the message says what to do.
            ImportError: the heads come with an adapter and peft is not installed.
            ValueError: heads, adapter and base do not belong together; a base already loaded must carry the
                adapter already: a model that the caller loaded is not changed.
        """
        if "device" in base_kwargs:
            raise TypeError(f"device is called device_map, as in transformers: {base_kwargs['device']!r}")
        hub = {key: base_kwargs[key] for key in HUB_ARGUMENTS if key in base_kwargs}
        is_named = heads is not None and heads != DEFAULT_HEADS
        loaded: Any = base
        source = find_base(base, **base_kwargs) if isinstance(base, (str, Path)) else None
        known = getattr(loaded, "name_or_path", None) if source is None else str(base)
        if isinstance(heads, (str, Path)):
            if heads == DEFAULT_HEADS and known is not None and heads_that_fit(known) is None:
                config = getattr(loaded, "config", None) if source is None else source.config
                heads = OWN_HEADS if config is not None and can_draft_itself(config) else heads
            if heads != OWN_HEADS:
                heads = load_heads(heads, base_name=known, **hub)  # before the base, which takes longer
        if source is not None:
            if isinstance(heads, HeadsCheckpoint):
                check_heads_fit_source(heads.heads, source)
            has_adapter = isinstance(heads, HeadsCheckpoint) and heads.adapter is not None
            # whoever has a card and names no place casts and moves the base; an adapter changes its weights
            is_unplaced = torch.cuda.is_available() and "device_map" not in base_kwargs
            own_engine = "eager" if has_adapter or is_unplaced else engine
            loaded = load_base(
                source, own_engine, dtype="auto" if is_unplaced and source.gguf is None else None
            )
        else:
            unread = sorted(base_kwargs if heads is None else base_kwargs.keys() - hub.keys())
            if unread:
                raise ValueError(f"{unread} go with a path or a hub id; this base is already loaded")
        check_is_model(loaded)
        loaded.eval()
        if heads == OWN_HEADS:
            heads = load_own_heads(loaded)
        if heads is None:
            model = cls(loaded, None, tree, tokenizer, engine, step=step)
        elif isinstance(heads, HeadsCheckpoint):
            heads.fit_to(loaded, is_shared=source is None)
            trees = (heads.tree, heads.tuned) if tree is None else (tree, ())
            model = cls(loaded, heads.heads, trees[0], tokenizer, engine, trees[1], step)
        else:
            raise TypeError(
                f"heads must be a path, a hub id or a HeadsCheckpoint, got {type(heads).__name__}; "
                "MedusaModel(base, heads) takes the modules themselves"
            )
        if source is not None:
            model._tokenizer_source = source
        if learn:
            model.learn(follow=not is_named)
        return model

    @property
    def device(self) -> torch.device:
        return lm_head_device(self.base)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that was given, else the base's own, loaded at first use. None if none was given and
        the base has no ``name_or_path``, such as a model built from a configuration.

        Raises:
            ValueError: the base's own cannot be loaded.
        """
        source = self._tokenizer_source
        if self._tokenizer is None and source:
            try:
                self._tokenizer = load_tokenizer(source)
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"no tokenizer could be loaded from {self.base.name_or_path!r}, where the base comes "
                    "from; pass tokenizer= to from_pretrained"
                ) from error
        return self._tokenizer

    @property
    def tree(self) -> CandidateTree:
        """The candidate tree of a call with one row; see :meth:`tree_for`."""
        return self.tree_for(1)

    def step_for(self, step: StepKind | None = None) -> StepKind:
        """How the steps of a call run that asks for ``step``, or for nothing.

        "auto" is "captured" on one CUDA device and "general" elsewhere. A call whose drafter or whose
        processors and criteria need the host at every step runs general steps there too."""
        return self._executor.step_for(step or self.step)

    def tree_for(self, batch_size: int, step: StepKind | None = None) -> CandidateTree:
        """The candidate tree of a call that names none, with ``batch_size`` rows and steps of kind ``step``.

        It is the tree that was tuned for this runtime (:meth:`medusa.trees.tuned_trees.Trees.tree_for`); the
        default tree where none was tuned. The tokens do not depend on it.
        """
        return self._executor.tree_for(batch_size, step or self.step)

    def drafter_for(self, batch_size: int) -> Drafter:
        """A new drafter, the one that a call with ``batch_size`` rows uses if it names none: see
        :meth:`medusa.drafters.registry.DrafterFactory.default`."""
        return self._executor.drafters.default(batch_size, self.step)

    def make_drafter(
        self,
        name: str,
        tree: CandidateTree | None = None,
        *,
        draft_length: int | None = None,
        draft_width: int = 1,
        draft_model: str | Path | CausalLM | None = None,
        exit_layer: int | None = None,
        eagle3: str | Path | HeadsCheckpoint | None = None,
    ) -> Drafter:
        """A drafter for ``drafter=`` of :meth:`generate`, with more settings than a name.

        Its model is loaded here, so make it once for many calls. It serves one call at a time.

        Args:
            name: as for :meth:`generate`: "draft-model", "early-exit+suffix", ...
            tree: the tree to fill; by default one of the length and width below, or for heads the model's.
            draft_length: draft tokens of a chain; None is the drafter's default.
            draft_width: number of independent draft chains, for rules that take a tree.
            draft_model: for "draft-model": a smaller model with the base's tokens, a directory, a hub id or a
                model.
            exit_layer: for "early-exit": how many layers of the base it runs.
            eagle3: for "eagle3": an EAGLE-3 head, a heads directory, a hub id or a loaded checkpoint.

        Raises:
            ValueError: there is no such drafter, it lacks something, or it cannot fill ``tree``; or a setting
                is out of bounds, or this drafter does not read it.
        """
        sources: dict[str, Any] = {"draft_model": draft_model, "eagle3": eagle3}
        settings = DrafterSettings(draft_length, draft_width, exit_layer=exit_layer, **sources)
        check_read_by(settings, name)
        return DrafterFactory(self, settings).make(name, tree)

    def use_step(self, step: StepKind) -> None:
        """Run decode steps in this way from here on, unless a call says otherwise.

        Raises:
            ValueError: such steps do not run on this base.
        """
        self._executor.check(step)
        self.step = step

    def use_tree(self, tree: CandidateTree) -> None:
        """Decode with ``tree`` from here on, for any number of rows: default and tuned trees are forgotten.

        Raises:
            ValueError: the heads cannot fill it.
        """
        self._trees = trees_of(self.heads, tree)
        self._executor.use_trees(self._trees)

    @property
    def can_compile(self) -> bool:
        """Whether :meth:`compile` has all that it needs here."""
        return self._executor.compiled_unsupported_reason() is None

    @property
    def plain_step_seconds(self) -> float | None:
        """The time of a step of one text that drafts nothing, as drafting has found it to know whether it
        pays; None before, and where it never stops."""
        return self._executor.costs.plain_seconds(num_rows=1)

    @property
    def is_compiled(self) -> bool:
        """Whether the libraries of :meth:`compile` are on disk; false where none are made."""
        return self.can_compile and all(path.exists() for path in self.library_paths)

    @property
    def library_paths(self) -> list[Path]:
        """Where the libraries of :meth:`compile` are, or will be."""
        return self._executor.library_paths()

    def compile(self) -> float:
        """Compile or load the libraries of ``step="compiled"`` for base and heads. Returns the seconds that
        it took.

        Raises:
            ValueError: this engine compiles no pass, or something is missing.
        """
        seconds = self._executor.compile()
        release_threads()
        return seconds

    def generate(
        self,
        inputs: Tensor | None = None,
        *,
        seed: int | Sequence[int] | Tensor | None = None,
        tree: CandidateTree | None = None,
        drafter: Drafter | str | None = None,
        acceptance: str = "exact",
        step: StepKind | None = None,
        prediction: Any = None,
        corpus: SuffixCorpus | None = None,
        streamer: BaseStreamer | None = None,
        **kwargs: Any,
    ) -> Tensor | MedusaOutput:
        """``transformers``' ``generate``, faster, with the same arguments and results.

        Several threads may call this, :meth:`stream` and ``base`` itself at once, and calls do not affect
        each other's results. A drafter, processor or criterion that is passed as an object serves one call at
        a time.

        Args:
            inputs: prompts (B, T) long, left-padded; or ``input_ids=`` with ``attention_mask=``.
            seed: an int (row r is sampled with seed + r) or one per row; None draws one from torch's global
                generator. Only sampling reads it.
            tree: the candidate tree, filled by ``drafter`` or by default by the heads;
                ``CandidateTree.chain(0)`` is plain decoding.
            drafter: a drafter object (:meth:`make_drafter`) or a name ("suffix"). Default:
                ``drafter_for(batch_size)``. With a lossy or sampled ``acceptance`` rule the default is the
                heads in :meth:`tree_for`, or in a chain of the same depth if the rule takes only chains.
                Where neither tree nor drafter is named and the base is float32, drafting pauses while it does
                not pay (:mod:`medusa.decoding.adaptive`).
            acceptance: "exact"; "typical", which is LOSSY; or a rule for drafters that sample
                ("token", "block", ...; see ``medusa.acceptance.rules``).
            step: how steps are run, for this call; the tokens are the same.
            prediction: the answer that is expected, an edited file say, as a text or token ids (P,), or a
                list with one of these or None for each row. Drafts copy from it; the tokens are the same.
            corpus: earlier texts that drafts copy from as well; the caller adds to it.
            streamer: gets the tokens as they are accepted, several at a time; batch size 1.
            kwargs: as in ``transformers`` (``max_new_tokens``, ``do_sample``, ``temperature``,
                ``generation_config``, ``logits_processor``, ``stopping_criteria``, ``stop_strings``, ...).

        Returns:
            sequences (B, T + new) long, or a :class:`MedusaOutput` with ``statistics`` when
            ``return_dict_in_generate=True``.
        """
        options = CallOptions(seed, tree, drafter, acceptance, step, prediction, corpus)
        return self._joined(self._call_transformers(inputs, kwargs), options, streamer)

    def stream(
        self,
        inputs: Tensor | None = None,
        *,
        seed: int | Sequence[int] | Tensor | None = None,
        tree: CandidateTree | None = None,
        drafter: Drafter | str | None = None,
        acceptance: str = "exact",
        step: StepKind | None = None,
        prediction: Any = None,
        corpus: SuffixCorpus | None = None,
        statistics: DecodingStatistics | None = None,
        **kwargs: Any,
    ) -> Generator[StepResult, None, None]:
        """The same tokens as :meth:`generate`, one step at a time; ``statistics`` is filled as it goes. With
        static or captured steps on a GPU, where the latter are the default, the results of several steps
        arrive at once; ``step="general"`` gives each as it comes."""
        options = CallOptions(seed, tree, drafter, acceptance, step, prediction, corpus)
        return self._decoded(self._call_transformers(inputs, kwargs), options, statistics)

    def continuous_batch(
        self,
        limits: BatchLimits | None = None,
        *,
        plain: bool = False,
    ) -> Batch:
        """A batch for continuous batching: requests (:meth:`request`) join and leave it between steps; see
        :mod:`medusa.decoding.batch`.

        The drafter and its tree change with the number of rows, and drafting pauses while it does not pay.

        Args:
            limits: the limits of the batch.
            plain: draft nothing; the tokens are the same.

        Raises:
            ValueError: steps of this model's kind cannot be drafted by its heads.
        """
        limits = limits or BatchLimits()
        plan = self._current_executor().plan_of_many(self.step, limits.max_rows, plain)
        release_threads()  # what is compiled now, before anybody waits for an answer, has taken some
        return Batch(plan, limits)

    def pooled_states(self, ids: Sequence[int], pooling: Pooling) -> PooledStates:
        """The embedding of a text with the tokens ``ids``, to be read; see
        :mod:`medusa.decoding.pooled_states`.

        Raises:
            ValueError: as :meth:`continuous_batch`.
        """
        return PooledStates(self._executor.plan_of_many(self.step, plain=True).runner, ids, pooling)

    def request(
        self,
        inputs: Tensor | None = None,
        *,
        seed: int | Sequence[int] | Tensor | None = None,
        num_logprobs: int | None = None,
        prediction: Any = None,
        corpus: SuffixCorpus | None = None,
        **kwargs: Any,
    ) -> DecodeRequest:
        """A request for :meth:`continuous_batch`, from the arguments of :meth:`generate`; ``inputs`` are
        (1, T) long.

        ``num_logprobs`` asks for the base's log-probability of each token, and of this number of the most
        likely tokens in its place.
        """
        request = decode_request(self.base, seed=seed, **self._call_transformers(inputs, kwargs))
        request = replace(request, num_logprobs=num_logprobs)
        return self._with_references(request, prediction, corpus)

    def references(
        self, prediction: Any, corpus: SuffixCorpus | None, prompts: Sequence[Tensor]
    ) -> tuple[References, ...]:
        """The reference texts of a request's rows: see :func:`medusa.drafters.references.references_of`."""

        def encode(text: str) -> list[int]:
            if self.tokenizer is None:
                raise ValueError("prediction as a text needs a tokenizer; pass tokenizer= to from_pretrained")
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]

        return references_of(prediction, corpus, prompts, vocab_size(self.base), encode)

    def _with_references(
        self, request: DecodeRequest, prediction: Any, corpus: SuffixCorpus | None
    ) -> DecodeRequest:
        if prediction is None and corpus is None:
            return request
        rows = zip(request.tokens, request.prompts, strict=True)
        prompts = [tokens[: len(prompt)] for tokens, prompt in rows]
        return replace(request, references=self.references(prediction, corpus, prompts))

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
        prediction: Any = None,
        corpus: SuffixCorpus | None = None,
        **call: Any,
    ) -> Tensor | MedusaOutput:
        """The decoding method for ``base.generate(..., custom_generate=medusa_model.decode)``.

        ``transformers`` hands a decoding method neither ``streamer`` nor ``assistant_model``, and refuses
        ``stop_strings`` there, whatever ``tokenizer`` it was given. :meth:`generate` takes streamers and stop
        strings. Here, bind the streamer: ``custom_generate=partial(model.decode, streamer=streamer)``.
        """
        if base is not self.base:
            raise ValueError("decode belongs to this MedusaModel's own base model, got another one")
        call |= {"input_ids": input_ids, "generation_config": generation_config}
        return self._joined(
            call, CallOptions(seed, tree, drafter, acceptance, step, prediction, corpus), streamer
        )

    def _call_transformers(self, inputs: Tensor | None, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments that ``transformers``' ``generate`` passes to a decoding method: the configuration
        merged, processors and stopping criteria built."""
        if inputs is not None and not isinstance(inputs, Tensor):
            raise TypeError(
                f"inputs must be token ids, a tensor (B, T), got {type(inputs).__name__}; for text: "
                "**model.tokenizer(text, return_tensors='pt')"
            )
        check_arguments(arguments)
        arguments = with_stop_strings(arguments, self.base, lambda: self.tokenizer)
        return self.base.generate(
            inputs,
            custom_generate=lambda _base, input_ids, **rest: {"input_ids": input_ids, **rest},
            **arguments,
        )

    def _decoded(
        self,
        call: dict[str, Any],
        options: CallOptions,
        statistics: DecodingStatistics | None,
        is_streamed: bool = True,
    ) -> Generator[StepResult, None, None]:
        """Build the request, the drafter and a batch, and decode. All public calls come through here."""
        request = decode_request(self.base, seed=options.seed, acceptance=options.acceptance, **call)
        request = self._with_references(request, options.prediction, options.corpus)
        with self._changing:
            plan = self._current_executor().plan(
                Call(request, options.step or self.step, options.drafter, options.tree)
            )
        batch = Batch(plan, statistics=statistics)
        if self.prefixes is not None and STEPS[plan.step].has_any_shape and request.is_exact:
            batch.prefixes = self.prefixes
        steps = decode(batch, request, is_streamed)
        return steps if self.learning is None else self._learned_from(request, steps, self.learning)

    def _learned_from(
        self, request: DecodeRequest, steps: Generator[StepResult, None, None], learning: IdleLearning
    ) -> Generator[StepResult, None, None]:
        """``steps``, whose answers are kept to learn from."""
        answers: list[list[int]] = [[] for _ in request.prompts]
        call = object()
        self._running.add(call)
        learning.pause()
        try:
            for result in steps:
                for answer, new in zip(answers, result.tokens, strict=True):
                    answer += new
                yield result
        finally:
            steps.close()
            self._running.discard(call)
            for prompt, answer in zip(request.prompts, answers, strict=True):
                learning.add(prompt, answer)

    def _joined(
        self, call: dict[str, Any], options: CallOptions, streamer: BaseStreamer | None
    ) -> Tensor | MedusaOutput:
        """Run all steps, and join their tokens to what ``generate`` returns."""
        input_ids = call["input_ids"].long()
        config = call["generation_config"]
        if streamer is not None and len(input_ids) > 1:
            raise ValueError(f"streamer works with batch size 1, got {len(input_ids)} rows; use stream()")
        statistics = DecodingStatistics()
        steps = self._decoded(call, options, statistics, streamer is not None)
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
