"""What a person sees of the inbox: its deliveries with their disposition and the reason for it."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, get_args

from webhooks.db import Transaction, compose
from webhooks.errors import Unreadable
from webhooks.sources import GitHub

Disposition = Literal["received", "applying", "parked", "processed", "ignored", "dead"]
DISPOSITIONS: tuple[Disposition, ...] = get_args(Disposition)
MOST = 1000

SUMMARY = (
    "SELECT id, source, event, received_at, attempt_count, max_attempts, not_before, parked_on, parent, position,\n"
    "    CASE WHEN status = 'received' AND parked_on IS NOT NULL THEN 'parked' ELSE status END AS disposition,\n"
    "    CASE WHEN status = 'dead' THEN last_error WHEN status IN ('processed', 'ignored') THEN reason\n"
    "        ELSE coalesce(reason, last_error) END AS reason"
)
LIST = compose(
    f"SELECT * FROM (\n{SUMMARY}\nFROM {{deliveries}}\n) AS d\n"  # noqa: S608 - a constant of ours
    "WHERE (%(source)s::text IS NULL OR lower(source) = lower(%(source)s))\n"
    "    AND (%(event)s::text IS NULL OR strpos(lower(event), lower(%(event)s)) > 0)\n"
    "    AND (%(disposition)s::text IS NULL OR disposition = %(disposition)s)\n"
    "    AND (%(since)s::timestamptz IS NULL OR received_at >= %(since)s)\n"
    "    AND (%(ago)s::interval IS NULL OR received_at >= statement_timestamp() - %(ago)s)\n"
    "    AND (%(before)s::bigint IS NULL OR id < %(before)s)\n"
    "ORDER BY id DESC LIMIT %(limit)s"
)
