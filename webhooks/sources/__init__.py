"""Who sends: one small module a provider, each with its recipe, its dedup key and its events."""

from webhooks.sources.base import EventHandler, Handler, Source
from webhooks.sources.github import GitHub
from webhooks.sources.shortcut import Shortcut
from webhooks.sources.standard_webhooks import StandardWebhooks

__all__ = ["EventHandler", "GitHub", "Handler", "Shortcut", "Source", "StandardWebhooks"]
