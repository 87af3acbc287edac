"""Who signs with which header: enough to recognise a request that came to the wrong URL."""

from __future__ import annotations

SIGNATURES = {
    "payload-signature": "Shortcut",
    "clubhouse-signature": "Shortcut (its old header)",
    "x-hub-signature-256": "GitHub",
    "x-hub-signature": "GitHub (SHA-1), Jira or Bitbucket",
    "webhook-signature": "Standard Webhooks",
    "svix-signature": "Svix",
    "stripe-signature": "Stripe",
    "x-slack-signature": "Slack",
    "linear-signature": "Linear",
    "sentry-hook-signature": "Sentry",
    "x-pagerduty-signature": "PagerDuty",
    "x-shopify-hmac-sha256": "Shopify",
    "x-twilio-signature": "Twilio",
    "x-signature-ed25519": "Discord",
    "x-hook-signature": "Asana",
    "x-notion-signature": "Notion",
    "x-zendesk-webhook-signature": "Zendesk",
    "x-zm-signature": "Zoom",
}
"""Who signs with which header."""
TOKENS = {"x-gitlab-token": "GitLab", "x-hook-secret": "Asana"}
"""Who sends a secret as it is in which header."""
COMPANIONS = frozenset({"webhook-id", "webhook-timestamp", "svix-id", "svix-timestamp", "x-slack-request-timestamp"})
"""What some of them sign besides the body."""


def named(header: str) -> str:
    """Return a header's name as it is commonly written."""
    return "-".join(part.capitalize() for part in header.split("-"))
