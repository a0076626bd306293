"""What Prometheus reads, with the names, meanings and buckets of vLLM's metrics.

A dashboard made for vLLM works here; its label `model_name` tells the stages apart. Names and
buckets are those of `PrometheusStatLogger` (vLLM v0.11.0, vllm/v1/metrics/loggers.py). What vLLM
has not is called `mini_vllm:...`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shared.engine.outputs import RequestOutput
from shared.engine.trace import StepRecord

from .driver import Observer, Stream

LABEL = "model_name"
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Metrics(Observer):
    """Counts what a driver tells, and asks its engines when somebody reads.

    Args:
        engines: those of the driver, by name.

    Attributes:
        registry: for `prometheus_client.generate_latest`.
    """

    def __init__(self, engines: Mapping[str, Any]) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._engines = dict(engines)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, (LABEL,), registry=self.registry, buckets=buckets)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, (LABEL, *labels), registry=self.registry)

        self._ttft = histogram(
            "vllm:time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            FIRST_TOKEN_BUCKETS,
        )
        self._itl = histogram(
            "vllm:inter_token_latency_seconds",
            "Every gap between two tokens of one request.",
            TOKEN_BUCKETS,
        )
        self._latency = histogram(
            "vllm:e2e_request_latency_seconds",
            "From the arrival of a request to its end.",
            REQUEST_BUCKETS,
        )
        self._queue = histogram(
            "vllm:request_queue_time_seconds",
            "From the arrival of a request to its first step.",
            REQUEST_BUCKETS,
        )
        self._step_tokens = histogram(
            "vllm:iteration_tokens_total", "Tokens computed in one step.", STEP_BUCKETS
        )
        self._ended = counter(
            "vllm:request_success", "Requests that ended, by reason.", "finished_reason"
        )
        self._prompt_tokens = counter(
            "vllm:prompt_tokens", "Prompt tokens of the requests that got a first token."
        )
        self._output_tokens = counter("vllm:generation_tokens", "Tokens generated.")
        self._queries = counter(
            "vllm:prefix_cache_queries",
            "Prompt tokens that were looked up in the prefix cache, counted with the first token.",
        )
        self._hits = counter("vllm:prefix_cache_hits", "Those of them that were there.")
        self.registry.register(_State(self._engines))
        for name in self._engines:  # so that zeros are shown from the start
            for metric in (self._ttft, self._itl, self._latency, self._queue, self._step_tokens):
                metric.labels(name)
            for count in (self._prompt_tokens, self._output_tokens, self._queries, self._hits):
                count.labels(name)

    def started(self, model: str, waited: float) -> None:
        self._queue.labels(model).observe(waited)

    def stepped(self, model: str, record: StepRecord) -> None:
        self._step_tokens.labels(model).observe(record.num_tokens)

    def output(self, stream: Stream, output: RequestOutput, num_seen: int) -> None:
        model, times = stream.model, output.metrics.token_times
        if num_seen == 0 and times:
            self._ttft.labels(model).observe(times[0] - stream.arrival_time)
            self._prompt_tokens.labels(model).inc(len(output.prompt_token_ids))
            self._queries.labels(model).inc(len(output.prompt_token_ids))
            self._hits.labels(model).inc(output.metrics.num_cached_tokens)
        self._output_tokens.labels(model).inc(len(times) - num_seen)
        for i in range(max(1, num_seen), len(times)):
            self._itl.labels(model).observe(times[i] - times[i - 1])
        if output.finished and output.metrics.finish_time is not None:
            self._ended.labels(model, output.finish_reason).inc()
            self._latency.labels(model).observe(output.metrics.finish_time - stream.arrival_time)


class _State:
    """How the engines stand at the moment of reading."""

    def __init__(self, engines: Mapping[str, Any]) -> None:
        self._engines = engines

    def describe(self) -> list[Metric]:
        """For the registry, which otherwise would read the engines to know the names."""
        return list(self._families().values())

    def collect(self) -> Iterator[Metric]:
        """Ask the engines."""
        families = self._families()
        for name, engine in self._engines.items():
            stats = engine.stats()
            usage = 1 - stats["free_blocks"] / stats["num_blocks"]
            values = {
                "running": stats["running"],
                "waiting": stats["waiting"],
                "prefilling": stats["prefilling"],
                "usage": usage,
                "preemptions": stats["preemptions"],
            }
            for key, value in values.items():
                families[key].add_metric([name], value)
        yield from families.values()

    def _families(self) -> dict[str, Any]:
        def gauge(name: str, text: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(name, text, labels=[LABEL])

        return {
            "running": gauge("vllm:num_requests_running", "Requests that hold blocks."),
            "waiting": gauge("vllm:num_requests_waiting", "Requests that hold none yet."),
            "prefilling": gauge(
                "mini_vllm:num_requests_prefilling",
                "Running requests whose prompt is under way (stage 04).",
            ),
            "usage": gauge("vllm:kv_cache_usage_perc", "Blocks in use; 1 is all of them."),
            "preemptions": CounterMetricFamily(
                "vllm:num_preemptions", "Requests that lost their blocks.", labels=[LABEL]
            ),
        }
