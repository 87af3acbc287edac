"""Metrics and logs.

Metrics are counted where things happen and collected from one registry; backlog and age are read from the tables when
they are asked for. Logs are lines of key and value, with delivery and row ids; tracebacks never show local variables,
which hold secrets.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()

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
SWEPT = Counter("webhooks_swept", "Rows freed or escalated by the sweep.", ("table", "phase"), registry=REGISTRY)
BACKLOG = Gauge("webhooks_backlog", "Rows waiting, by phase.", ("table", "phase"), registry=REGISTRY)
OLDEST_SECONDS = Gauge(
    "webhooks_oldest_seconds",
    "How long the row that has been due for longest waits.",
    ("table", "phase"),
    registry=REGISTRY,
)
IN_PROGRESS = Gauge("webhooks_in_progress", "Rows claimed, by phase.", ("table", "phase"), registry=REGISTRY)
ESCALATED = Gauge("webhooks_escalated", "Rows a person has to decide about, by table.", ("table",), registry=REGISTRY)


def configure_logging(*, json: bool | None = None, level: int = logging.INFO) -> None:
    """Send log lines to standard error: for people on a terminal, as JSON elsewhere.

    Args:
        json: JSON or not; None looks whether standard error is a terminal.
        level: the lowest level shown.
    """
    as_json = not sys.stderr.isatty() if json is None else json
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([structlog.processors.format_exc_info] if as_json else []),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
