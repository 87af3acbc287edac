"""Calls to the REST APIs of GitHub and Shortcut: a client for each, and one way to ask."""

from webhooks.provider_api.answers import decoded
from webhooks.provider_api.calling import Clock, request
from webhooks.provider_api.clients import ProviderClient, github_client, shortcut_client

__all__ = ["Clock", "ProviderClient", "decoded", "github_client", "request", "shortcut_client"]
