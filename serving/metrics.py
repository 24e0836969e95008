"""Prometheus metrics, under the names that vLLM's operators know with the prefix `jaxserve:`."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.serving.stats import RequestTimings

PREFIX = "jaxserve:"
FINISH_REASONS = ("stop", "length", "abort", "error")

_FIRST_TOKEN_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_REQUEST_BOUNDS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class Metrics:
    """The engine's observer, and the page that /metrics serves. Every series carries the label model_name."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens computed")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Submission to first token", _FIRST_TOKEN_BOUNDS
        )
        self._inter_token = self._histogram("inter_token_latency_seconds", "Between two tokens", _TOKEN_BOUNDS)
        self._end_to_end = self._histogram("e2e_request_latency_seconds", "Submission to end", _REQUEST_BOUNDS)
        self._queue = self._histogram("request_queue_time_seconds", "Submission to admission", _REQUEST_BOUNDS)
        self._prefill = self._histogram("request_prefill_time_seconds", "Admission to first token", _REQUEST_BOUNDS)
        self._decode = self._histogram("request_decode_time_seconds", "First token to last", _REQUEST_BOUNDS)
        finished = Counter(
            PREFIX + "request_success",
            "Choices that ended, by reason",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self._finished = {reason: finished.labels(model_name, reason) for reason in FINISH_REASONS}

    def attach(self, stats: Callable[[], Mapping[str, Any]]) -> None:
        """Adds what is read from `Engine.stats` when the page is asked for."""
        self._registry.register(_EngineState(stats, self._model_name))

    def render(self) -> tuple[bytes, str]:
        """The page and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    # EngineObserver

    def step(self, prompt_tokens: int, generated_tokens: int) -> None:
        self._prompt_tokens.inc(prompt_tokens)
        self._generation_tokens.inc(generated_tokens)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def inter_token(self, seconds: float) -> None:
        self._inter_token.observe(seconds)

    def request_finished(self, timings: RequestTimings) -> None:
        self._finished[timings.finish_reason].inc()
        self._end_to_end.observe(timings.end_to_end)
        for histogram, seconds in (
            (self._queue, timings.queue),
            (self._prefill, timings.prefill),
            (self._decode, timings.decode),
        ):
            if seconds is not None:
                histogram.observe(seconds)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, ("model_name",), registry=self._registry).labels(self._model_name)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        histogram = Histogram(PREFIX + name, text, ("model_name",), registry=self._registry, buckets=bounds)
        return histogram.labels(self._model_name)


class _EngineState(Collector):
    """Gauges and totals that the engine keeps anyway."""

    def __init__(self, stats: Callable[[], Mapping[str, Any]], model_name: str) -> None:
        self._stats = stats
        self._labels = [model_name]

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield self._gauge("num_requests_running", "Sequences that hold a slot", stats["running"])
        yield self._gauge("num_requests_waiting", "Sequences in the queue", stats["waiting"])
        yield self._gauge("kv_cache_usage_perc", "Share of KV pages in use, 0 to 1", stats["kv_usage"])
        yield self._total("prefix_cache_queries", "Prompt tokens looked up", stats["prefix_queries"])
        yield self._total("prefix_cache_hits", "Prompt tokens found", stats["prefix_hits"])
        yield self._total("num_preemptions", "Sequences put back to be computed again", stats["preemptions"])
        yield self._phases(stats["phases"])
        if stats.get("speculation"):
            yield from self._speculation(stats["speculation"])

    def _speculation(self, stats: Mapping[str, Any]) -> Iterator[Metric]:
        yield self._total("spec_decode_num_drafts", "Steps of sequences that brought proposals", stats["num_drafts"])
        yield self._total("spec_decode_num_draft_tokens", "Tokens proposed", stats["num_proposed"])
        yield self._total("spec_decode_num_accepted_tokens", "Proposed tokens accepted", stats["num_accepted"])
        name, text = "spec_decode_num_accepted_tokens_per_pos", "Proposed tokens accepted, by their place"
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name", "position"])
        for position, count in enumerate(stats["accepted_at"]):
            family.add_metric([*self._labels, str(position)], count)
        yield family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric(self._labels, value)
        return family

    def _total(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric(self._labels, value)
        return family

    def _phases(self, phases: Mapping[str, Mapping[str, Any]]) -> Metric:
        text = "Time of each phase of a step; 'host' is all but 'wait'"
        family = HistogramMetricFamily(PREFIX + "step_phase_seconds", text, labels=["model_name", "phase"])
        for phase, times in phases.items():
            below, buckets = 0, []
            for bound, count in zip([*times["bounds"], "+Inf"], times["buckets"], strict=True):
                below += count
                buckets.append((str(bound), below))
            family.add_metric([*self._labels, phase], buckets, cast("float", times["seconds"]))
        return family
