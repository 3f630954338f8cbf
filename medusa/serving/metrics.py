"""Metrics of the server, for Prometheus; names after the prefix are vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from medusa.decoding.batch import Batch
from medusa.decoding.prefix_store import PrefixStore
from medusa.learning.idle_learning import IdleLearning

PREFIX = "medusa:"
SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class _BatchCollector(Collector):
    """Metrics of the batches of a model that is loaded, collected on demand."""

    def __init__(
        self,
        batches: Mapping[bool, Batch],
        num_submitted: Callable[[], int],
        learning: IdleLearning | None,
        store: PrefixStore | None,
    ):
        self.batches = batches
        self.num_submitted = num_submitted
        self.learning = learning
        self.store = store

    def collect(self) -> Iterable[Metric]:
        batches = [*self.batches.values()]
        used = sum(batch.num_slots for batch in batches) / sum(batch.limits.max_slots for batch in batches)
        gauges = {
            "num_requests_running": (
                "Requests that decode, or whose prompts are being read",
                sum(batch.num_rows + batch.num_prefilling for batch in batches),
            ),
            "num_requests_waiting": (
                "Requests that wait",
                sum(len(batch.waiting) for batch in batches) + self.num_submitted(),
            ),
            "kv_cache_usage_perc": ("Part of the cache slots that is allocated", used),
            "prefix_cache_bytes": ("Kept prefixes", sum(batch.prefixes.num_bytes for batch in batches)),
        }
        if self.store is not None:
            gauges["prefix_store_bytes"] = "Kept prefixes on disk, of all models", self.store.num_bytes
        if self.learning is not None:
            report = self.learning.report()
            version = report["version"] or {"number": 0}
            gauges |= {
                "learning_running": ("Whether heads learn now", report["state"] == "learning"),
                "learning_new_bytes": ("Texts that no round has learned from", report["new_bytes"]),
                "learned_version": ("The version of learned heads in use; 0: none", version["number"]),
            }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(PREFIX + name, text, value=float(value))
        counters = {
            "prefix_cache_cut": (
                "Texts that were cut or dropped for lack of memory",
                sum(batch.prefixes.num_cut for batch in batches),
            ),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(PREFIX + name, text, value=float(value))


class ServerMetrics:
    """The counters of one model; they go on where it is loaded again."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._loaded: _BatchCollector | None = None
        self._first = Histogram(
            f"{PREFIX}time_to_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=SECONDS,
            registry=self.registry,
        )
        self._between = Histogram(
            f"{PREFIX}inter_token_latency_seconds",
            "Between tokens; tokens of one step share its time evenly",
            buckets=SECONDS,
            registry=self.registry,
        )
        self._generated = Counter(f"{PREFIX}generation_tokens", "Tokens of answers", registry=self.registry)
        self._prompt = Counter(f"{PREFIX}prompt_tokens", "Tokens of prompts", registry=self.registry)
        self._reused = Counter(
            f"{PREFIX}prefix_cache_hits", "Tokens of prompts that were not read again", registry=self.registry
        )
        self._drafts, self._draft_tokens, self._accepted = (
            Counter(f"{PREFIX}spec_decode_num_{name}", text, registry=self.registry)
            for name, text in (
                ("drafts", "Steps of answers that guessed"),
                ("draft_tokens", "Draft tokens verified"),
                ("accepted_tokens", "Draft tokens that are in answers"),
            )
        )
        self._accepted_per_position = Counter(
            f"{PREFIX}spec_decode_num_accepted_tokens_per_pos",
            "The same by depth, from 0",
            ["position"],
            registry=self.registry,
        )
        self._embedded = Counter(
            f"{PREFIX}embedding_tokens", "Tokens of texts that were embedded", registry=self.registry
        )
        self._ended = Counter(
            f"{PREFIX}request_success",
            "Answers by how they ended",
            ["finished_reason"],
            registry=self.registry,
        )

    def watch(
        self,
        batches: Mapping[bool, Batch],
        num_submitted: Callable[[], int],
        learning: IdleLearning | None = None,
        store: PrefixStore | None = None,
    ) -> None:
        """Tell of ``batches`` too, until :meth:`unwatch`; ``num_submitted`` counts the requests that they do
        not know of yet."""
        self._loaded = _BatchCollector(batches, num_submitted, learning, store)
        self.registry.register(self._loaded)

    @property
    def is_loaded(self) -> bool:
        """Whether there are batches to tell of."""
        return self._loaded is not None

    def unwatch(self) -> None:
        """Let go of the batches, which are no more."""
        if self._loaded is not None:
            self.registry.unregister(self._loaded)
            self._loaded = None

    def began(self, seconds: float, num_tokens: int, num_prompt: int, num_reused: int) -> None:
        """An answer has got its first tokens, so long after it was asked for."""
        self._first.observe(seconds)
        self._generated.inc(num_tokens)
        self._prompt.inc(num_prompt)
        self._reused.inc(num_reused)

    def went_on(self, seconds: float, num_tokens: int) -> None:
        """An answer has got more tokens, so long after the last ones."""
        for _ in range(num_tokens):
            self._between.observe(seconds / num_tokens)
        self._generated.inc(num_tokens)

    def drafted(self, num_drafted: int, accepted: Iterable[int]) -> None:
        """A step of an answer has verified ``num_drafted`` draft tokens, and ``accepted`` are the depths of
        those that are in the answer."""
        if not num_drafted:
            return
        self._drafts.inc()
        self._draft_tokens.inc(num_drafted)
        for depth in accepted:
            self._accepted.inc()
            self._accepted_per_position.labels(depth - 1).inc()

    def embedded(self, num_tokens: int) -> None:
        """So many tokens of texts are embedded."""
        self._embedded.inc(num_tokens)

    def ended(self, reason: str) -> None:
        self._ended.labels(reason).inc()

    def exposed(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)


class _ByModel(Collector):
    """The metrics of several models, each with its name as the label ``model_name``, as in vLLM."""

    def __init__(self, metrics: Mapping[str, ServerMetrics]):
        self.metrics = metrics

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for name, metrics in self.metrics.items():
            for family in metrics.registry.collect():
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    merged.add_sample(sample.name, {"model_name": name, **sample.labels}, sample.value)
        loaded = GaugeMetricFamily(
            f"{PREFIX}model_loaded", "Whether a model is in memory", labels=["model_name"]
        )
        for name, metrics in self.metrics.items():
            loaded.add_metric([name], float(metrics.is_loaded))
        return [*families.values(), loaded]


def exposed_by_model(metrics: Mapping[str, ServerMetrics]) -> bytes:
    """The text that Prometheus reads of several models, by their names."""
    registry = CollectorRegistry()
    registry.register(_ByModel(metrics))
    return generate_latest(registry)
