"""A webhook consumer whose work happens once. Everything a user writes imports from here."""

from webhooks.claim import Claim
from webhooks.consumer import Consumer
from webhooks.db import Transaction
from webhooks.delivery import Event
from webhooks.errors import Escalate, Ignore, LostClaim, NotDone, Park, Snooze
from webhooks.gate import Gate
from webhooks.phase import Done, Moved
from webhooks.pool import Pool
from webhooks.sources import GitHub, Shortcut, StandardWebhooks

__all__ = [
    "Claim",
    "Consumer",
    "Done",
    "Escalate",
    "Event",
    "Gate",
    "GitHub",
    "Ignore",
    "LostClaim",
    "Moved",
    "NotDone",
    "Park",
    "Pool",
    "Shortcut",
    "Snooze",
    "StandardWebhooks",
    "Transaction",
]
