"""Who sends: `POST /webhooks/shortcut` and `POST /webhooks/github`."""

from __future__ import annotations

from handlers.settings import settings
from webhooks import GitHub, Shortcut

shortcut = Shortcut(bot_member_id=settings().shortcut_bot)
github = GitHub()
