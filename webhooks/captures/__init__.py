"""Deliveries in files: the lines of `webhooks export`, payloads, single requests as they were captured."""

from webhooks.captures.capture import Capture
from webhooks.captures.files import captures
from webhooks.captures.lines import VERSION, written

__all__ = ["VERSION", "Capture", "captures", "written"]
