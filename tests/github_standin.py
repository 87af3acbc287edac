"""A stand-in for GitHub's delivery log: pages by cursor, attempts grouped by guid, and redelivery on demand."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import respx

from webhooks.provider_api import Clock

HOOK = 101
API = "https://github.test"
PATH = f"/repos/acme/app/hooks/{HOOK}"


class DeliveryLog:
    """What GitHub knows of one hook.

    Attributes:
        asked: the attempts that it was asked to make again, in order.
        pages: how many pages were read.
    """

    def __init__(self, now: datetime | None = None) -> None:
        self.now = (now or datetime.now(UTC)).replace(microsecond=0)
        self.asked: list[int] = []
        self.pages = 0
        self._attempts: list[dict[str, Any]] = []

    def add(
        self, *statuses: str, ago: timedelta, guid: str | None = None, event: str = "push", action: str | None = None
    ) -> str:
        """Log a delivery with an attempt for each status, the last one so long `ago`, and return its guid."""
        return self._add(guid or str(uuid.uuid4()), statuses, ago, event, action, again=False)

    def add_again(self, guid: str, *statuses: str, ago: timedelta) -> None:
        """Log redeliveries of a delivery, the last one so long `ago`."""
        self._add(guid, statuses, ago, "push", None, again=True)

    def forget_first(self, guid: str) -> None:
        """Drop the first attempt at a delivery, as it is when it grows too old."""
        self._attempts.remove(next(attempt for attempt in self._attempts if attempt["guid"] == guid))

    def _add(
        self, guid: str, statuses: tuple[str, ...], ago: timedelta, event: str, action: str | None, *, again: bool
    ) -> str:
        for place, status in enumerate(statuses):
            delivered_at = self.now - ago - timedelta(minutes=len(statuses) - 1 - place)
            self._attempts.append(
                {
                    "id": 0,
                    "guid": guid,
                    "delivered_at": delivered_at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
                    "redelivery": again or place > 0,
                    "duration": 0.03,
                    "status": status,
                    "status_code": {"OK": 202, "failed to connect": 502}.get(status, 0),
                    "event": event,
                    "action": action,
                    "installation_id": None,
                    "repository_id": 1,
                    "throttled_at": None,
                }
            )
        # Numbered in the order of time, as GitHub's are.
        self._attempts.sort(key=lambda attempt: str(attempt["delivered_at"]))
        for number, attempt in enumerate(self._attempts):
            attempt["id"] = 9_000_000_000 + number
        return guid

    def newest(self, guid: str) -> int:
        """The id of the newest attempt at a delivery."""
        return max(attempt["id"] for attempt in self._attempts if attempt["guid"] == guid)

    def guid_of(self, id: int) -> str:
        return next(str(attempt["guid"]) for attempt in self._attempts if attempt["id"] == id)

    def page(self, base: str, per_page: int, cursor: str | None) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """A page, the newest first, and its headers."""
        self.pages += 1
        newest_first = list(reversed(self._attempts))
        start = int(cursor.removeprefix("v1_")) if cursor else 0
        items = newest_first[start : start + per_page]
        if start + per_page >= len(newest_first):
            return items, {}
        following = f"{base}/deliveries?per_page={per_page}&cursor=v1_{start + per_page}"
        first = f"{base}/deliveries?per_page={per_page}"
        return items, {"link": f'<{first}>; rel="first", <{following}>; rel="next"'}

    def answer(self, mock: respx.MockRouter, redeliver: Callable[[str], Awaitable[httpx.Response | None]]) -> None:
        """Have respx answer for GitHub; `redeliver` is given the guid, and may answer instead of the 202."""

        def deliveries(request: httpx.Request) -> httpx.Response:
            params = request.url.params
            items, headers = self.page(f"{API}{PATH}", int(params.get("per_page", "30")), params.get("cursor"))
            return httpx.Response(200, json=items, headers=headers)

        async def attempts(request: httpx.Request, id: str) -> httpx.Response:
            self.asked.append(int(id))
            return await redeliver(self.guid_of(int(id))) or httpx.Response(202, json={})

        mock.post(url__regex=rf"{API}{PATH}/deliveries/(?P<id>\d+)/attempts$").mock(side_effect=attempts)
        mock.get(url__startswith=f"{API}{PATH}/deliveries").mock(side_effect=deliveries)


class StillClock:
    """Time that passes only when somebody waits; what happens meanwhile is done by `meanwhile`."""

    def __init__(self, now: datetime) -> None:
        self._now = now.timestamp()
        self.waits: list[float] = []
        self.meanwhile: Callable[[], Awaitable[None]] | None = None

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self._now, self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self._now += seconds
        if self.meanwhile is not None:
            await self.meanwhile()
