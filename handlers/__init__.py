"""The application that `webhooks serve` runs: what a team edits. `handlers:consumer` is the default of `--app`."""

from __future__ import annotations

from handlers.patch_sessions import sessions
from handlers.sources import github, shortcut
from handlers.standin import standin
from webhooks import Consumer

consumer = Consumer(gates=[sessions], sources=[shortcut, github], dev=standin)
