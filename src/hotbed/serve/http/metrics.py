"""Figures of a server, as Prometheus reads them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    multiprocess,
)

__all__ = ["CONTENT_TYPE_LATEST", "FIGURES", "Metrics", "forget_folder"]

FIGURES = "PROMETHEUS_MULTIPROC_DIR"
"""Variable in which prometheus-client finds where several processes count."""
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)


class Metrics:
    """Counters of a worker. Where there are several, all are told, through files that they share."""

    def __init__(self) -> None:
        own = CollectorRegistry()
        self._registry = own
        if FIGURES in os.environ:
            self._registry = CollectorRegistry()
            multiprocess.MultiProcessCollector(self._registry)  # type: ignore[no-untyped-call]
        self.requests = Counter(
            "hotbed_requests",
            "Requests, by endpoint and status.",
            ["endpoint", "status"],
            registry=own,
        )
        self.seconds = Histogram(
            "hotbed_request_seconds",
            "From the headers of a request to the end of its answer.",
            ["endpoint"],
            buckets=SECONDS,
            registry=own,
        )
        self.batch = Histogram(
            "hotbed_batch_samples", "Samples answered at once.", buckets=SAMPLES, registry=own
        )
        self.samples = Counter("hotbed_samples", "Samples answered.", registry=own)
        self.waiting = Gauge(
            "hotbed_waiting_samples",
            "Samples of requests that are not answered yet.",
            multiprocess_mode="livesum",
            registry=own,
        )
        self.versions = Counter(
            "hotbed_versions", "Versions of the model that were opened.", registry=own
        )

    def text(self) -> bytes:
        """Return all figures in Prometheus' text format."""
        if folder := os.environ.get(FIGURES):
            _forget_dead(folder)
        return generate_latest(self._registry)


def forget_folder() -> None:
    """Remove the files in which workers count, where nobody reads them any more."""
    if folder := os.environ.get(FIGURES):
        shutil.rmtree(folder, ignore_errors=True)


def _forget_dead(folder: str) -> None:
    """Remove what workers that are gone had waiting. Their counts stay."""
    for name in os.listdir(folder):
        found = re.fullmatch(r"gauge_live\w+_(\d+)\.db", name)
        if found is not None and not os.path.exists(f"/proc/{found[1]}"):
            with contextlib.suppress(FileNotFoundError):  # another worker was faster
                multiprocess.mark_process_dead(found[1], folder)  # type: ignore[no-untyped-call]
