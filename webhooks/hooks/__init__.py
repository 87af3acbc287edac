"""Hooks at providers: the ones a tunnel registers while it runs, and lasting ones."""

from webhooks.hooks.left_behind import Record, hook_secrets, record
from webhooks.hooks.registration import Registered, Wanted, hooks_at, reachable, registered, tidied
from webhooks.hooks.target import Hook, Target, events_for, parsed, source_of

__all__ = [
    "Hook",
    "Record",
    "Registered",
    "Target",
    "Wanted",
    "events_for",
    "hook_secrets",
    "hooks_at",
    "parsed",
    "reachable",
    "record",
    "registered",
    "source_of",
    "tidied",
]
