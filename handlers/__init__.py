"""The application that `webhooks serve` runs: what a team edits. `handlers:consumer` is the default of `--app`."""

from __future__ import annotations

from handlers import github_issues as github_issues  # registers its events
from handlers.demo import demo
from handlers.heartbeat_command import heartbeat
from handlers.heartbeat_routes import heartbeat_routes
from handlers.issues import issues
from handlers.patch_sessions import sessions
from handlers.settings import unset_tokens
from handlers.sources import github, shortcut
from handlers.standin import standin
from webhooks import Consumer

consumer = Consumer(
    gates=[sessions, issues],
    sources=[shortcut, github],
    routes=heartbeat_routes,
    commands=[heartbeat, demo],
    dev=standin,
    warnings=unset_tokens,
)
