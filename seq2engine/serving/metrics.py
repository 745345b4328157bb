"""The server's metrics in Prometheus format."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from seq2engine.runtime.serving.counters import SECONDS, Histogram
from seq2engine.runtime.serving.scheduler import Scheduler


class SchedulerCollector(Collector):
    """The scheduler's counters, read when they are asked for."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler

    def collect(self) -> Iterator[Metric]:
        scheduler, counters = self.scheduler, self.scheduler.counters
        yield GaugeMetricFamily("seq2engine_queue_length", "Requests waiting for a row.", scheduler.queued)
        yield GaugeMetricFamily("seq2engine_rows_used", "Requests being decoded.", scheduler.active)
        yield GaugeMetricFamily("seq2engine_rows", "Maximum requests decoded together.", scheduler.rows)
        requests = CounterMetricFamily("seq2engine_requests", "Texts by outcome.", labels=["outcome"])
        for outcome, count in counters.requests.items():
            requests.add_metric([outcome], count)
        yield requests
        yield CounterMetricFamily("seq2engine_tokens", "Tokens of the best outputs.", counters.tokens)
        yield CounterMetricFamily("seq2engine_steps", "Decoder steps.", counters.steps)
        yield CounterMetricFamily("seq2engine_step_rows", "Rows in use, summed over steps.", counters.rows)
        free = counters.stepped_rows - counters.rows
        yield CounterMetricFamily("seq2engine_step_rows_free", "Free rows, summed over steps.", free)
        yield histogram("seq2engine_queue_seconds", "Seconds until a row was free.", counters.waited)
        yield histogram("seq2engine_first_token_seconds", "Seconds until the first token.", counters.first_token)
        yield histogram("seq2engine_request_seconds", "Seconds until the result.", counters.latency)


def histogram(name: str, about: str, counted: Histogram) -> HistogramMetricFamily:
    ends = [*map(str, SECONDS), "+Inf"]
    return HistogramMetricFamily(
        name, about, list(zip(ends, itertools.accumulate(counted.counts), strict=True)), counted.total
    )


class Metrics:
    """All metrics of one server."""

    def __init__(self, scheduler: Scheduler):
        self.registry = CollectorRegistry()
        self.registry.register(SchedulerCollector(scheduler))
        self.responses = Counter(
            "seq2engine_http_responses", "Responses by path and status.", ["path", "status"], registry=self.registry
        )

    def text(self) -> bytes:
        return generate_latest(self.registry)
