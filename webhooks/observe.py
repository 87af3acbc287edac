"""Metrics and logs.

Metrics are counted where things happen and collected from one registry; backlog and age are read from the tables when
they are asked for. Logs are lines of key and value, with delivery and row ids; tracebacks never show local variables,
which hold secrets.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import Any, TextIO, cast

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from structlog.typing import Processor

from webhooks.text import traceback_of, without_values

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)

DELIVERIES = Counter(
    "webhooks_deliveries", "Deliveries answered, by source and outcome.", ("source", "outcome"), registry=REGISTRY
)
REJECTIONS = Counter(
    "webhooks_rejections", "Requests refused, by source and cause.", ("source", "cause"), registry=REGISTRY
)
ACCEPT_SECONDS = Histogram(
    "webhooks_accept_seconds",
    "From the last byte of a request to its commit.",
    registry=REGISTRY,
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
)
CLAIMS = Counter(
    "webhooks_claims",
    "Claims tried, by phase: won, or lost to somebody else.",
    ("table", "phase", "result"),
    registry=REGISTRY,
)
OUTCOMES = Counter("webhooks_outcomes", "How claims ended, by phase.", ("table", "phase", "outcome"), registry=REGISTRY)
LEASE_LOSSES = Counter(
    "webhooks_lease_losses",
    "Claims whose row was somebody else's before their work had ended, by phase.",
    ("table", "phase"),
    registry=REGISTRY,
)
SWEPT = Counter("webhooks_swept", "Rows freed or escalated by the sweep.", ("table", "phase"), registry=REGISTRY)

WRONG_PATHS = Counter(
    "webhooks_wrong_paths", "Requests to the receiver for a path that is no source's.", registry=REGISTRY
)

BACKLOG = Gauge("webhooks_backlog", "Rows waiting, by phase.", ("table", "phase"), registry=REGISTRY)
PARKED = Gauge(
    "webhooks_parked", "Deliveries that wait for their row to move on.", ("table", "phase"), registry=REGISTRY
)
WANTING = Gauge(
    "webhooks_wanting", "Deliveries left for a process that handles them.", ("table", "phase"), registry=REGISTRY
)
OLDEST_SECONDS = Gauge(
    "webhooks_oldest_seconds",
    "How long the row that has been due for longest waits; 0 when none is due.",
    ("table", "phase"),
    registry=REGISTRY,
)
IN_PROGRESS = Gauge("webhooks_in_progress", "Rows claimed, by phase.", ("table", "phase"), registry=REGISTRY)
ESCALATED = Gauge(
    "webhooks_escalated", "Rows a person has to decide about, by phase.", ("table", "phase"), registry=REGISTRY
)
DEGRADED = Gauge(
    "webhooks_degraded",
    "Whether something this process looks after is at fault, by its name.",
    ("name",),
    registry=REGISTRY,
)
DATABASE_UP = Gauge("webhooks_database_up", "Whether the database answered just now.", registry=REGISTRY)


class Health:
    """What is at fault in this process though it still does its main job: shown by `/readyz`, `status` and a metric.

    Attributes:
        degraded: the reason by the name of what is at fault, such as `orders.packing`.
        leaving: whether the process was asked to stop.
    """

    def __init__(self) -> None:
        self.degraded: dict[str, str] = {}
        self.leaving = False

    def report(self, name: str, reason: str | None) -> None:
        """Note what is at fault, or that it is well again.

        Args:
            name: what it is about: a gate, a phase, a source. Shown without a token, so it holds no value of a row.
            reason: for a person; None when it is well.
        """
        if reason is None:
            self.degraded.pop(name, None)
        else:
            self.degraded[name] = reason
        DEGRADED.labels(name).set(reason is not None)


def configure_logging(*, json: bool | None = None, level: int = logging.INFO) -> None:
    """Send log lines to standard error: for people on a terminal, as JSON elsewhere.

    One that cannot be written (the terminal or the reader is gone, the disk is full) is dropped: nothing that is worked
    on may fail for it.

    Those of libraries, which use the standard library's logging, come out in the same form from `WARNING` on.

    Args:
        json: JSON or not; None looks whether standard error is a terminal.
        level: the lowest level of ours shown.
    """
    as_json = not sys.stderr.isatty() if json is None else json
    told: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    shown: Processor = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    written = [_without_values, shown]
    structlog.configure(
        processors=[*told, *written],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", _Forgiving(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*told, _name_logger],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *written],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(level, logging.WARNING), force=True)


class _Forgiving:
    """A stream to which nothing fails to be written, as far as who writes can tell."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def _without_values(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Write exceptions out, and leave out what PostgreSQL says of a row's values, whoever quotes it."""
    error = event.pop("exc_info", None)
    if error is True:
        error = sys.exc_info()
    if isinstance(error, tuple):
        error = cast("tuple[object, ...]", error)[1]
    texts = {name: without_values(value) if isinstance(value, str) else value for name, value in event.items()}
    return {**texts, "exception": traceback_of(error)} if isinstance(error, BaseException) else texts


def _name_logger(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    record = event.get("_record")
    return event if record is None else {**event, "logger": record.name}
