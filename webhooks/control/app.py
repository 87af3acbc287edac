"""The control plane's application: its paths, and the consumer's own behind the same checks."""

from __future__ import annotations

from collections.abc import Collection
from typing import get_args

import psycopg
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from webhooks import deliveries, observe
from webhooks.consumer import Consumer
from webhooks.control.checks import Checks
from webhooks.control.decisions import Decisions
from webhooks.control.feed import Feed
from webhooks.control.health import OK, Process, checks
from webhooks.control.metrics import show
from webhooks.db import Transaction
from webhooks.errors import Unavailable
from webhooks.status import PhaseStatus, as_json, status


class Control:
    """Answers about one process and its database.

    Args:
        process: what runs in it.
        consumer: whose gates are counted, and whose `routes` are served beside ours.

    Attributes:
        feed: to be told of accepts, and to be stopped before the server is.
    """

    def __init__(self, process: Process, consumer: Consumer) -> None:
        self._process = process
        self._consumer = consumer
        self.feed = Feed(process.asker.pool, consumer)

    def app(self, hosts: Collection[str] = ()) -> Starlette:
        """Make the ASGI application.

        Args:
            hosts: names under which it may be asked, besides those of this machine and of `WEBHOOKS_CONTROL_HOSTS`.
        """
        settings = self._process.settings
        routes = [
            Route("/healthz", self.healthz),
            Route("/readyz", self.readyz),
            Route("/metrics", self.metrics),
            Route("/api/status", self.status),
            Route("/api/deliveries", self.deliveries),
            Route("/api/deliveries/{id:int}", self.delivery),
            *Decisions(self._process, self._consumer).routes(),
            *self.feed.routes(),
            *self._consumer.routes,
        ]
        allowed = {*hosts, *settings.control_host_names}
        app = Starlette(
            routes=routes,
            middleware=[Middleware(Checks, token=settings.control_token, hosts=allowed)],
            exception_handlers={HTTPException: _refuse, Unavailable: _away, psycopg.Error: _away},
        )
        app.state.pool = self._process.asker.pool  # for the consumer's routes
        return app

    async def healthz(self, request: Request) -> Response:
        return JSONResponse({"status": OK})

    async def readyz(self, request: Request) -> Response:
        found = await checks(self._process)
        ready = all(answer == OK for answer in found.values())
        return JSONResponse({"ready": ready, "checks": found}, 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        try:
            show(await self._status())
        except (Unavailable, psycopg.Error):
            show(None)
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(observe.REGISTRY), headers={"content-type": content_type})

    async def status(self, request: Request) -> Response:
        return JSONResponse({"phases": as_json(await self._status())})

    async def deliveries(self, request: Request) -> Response:
        wanted = _filter(request)

        async def question(tx: Transaction) -> list[dict[str, object]]:
            return await deliveries.listed(tx, wanted)

        rows = await self._process.asker.ask(question)
        return JSONResponse({"deliveries": [deliveries.as_json(row) for row in rows]})

    async def delivery(self, request: Request) -> Response:
        id = request.path_params["id"]

        async def question(tx: Transaction) -> dict[str, object] | None:
            return await deliveries.one(tx, id)

        row = await self._process.asker.ask(question) if id < 2**63 else None
        if row is None:
            raise HTTPException(404, f"there is no delivery {id}")
        return JSONResponse(deliveries.as_json(row))

    async def _status(self) -> list[PhaseStatus]:
        async def question(tx: Transaction) -> list[PhaseStatus]:
            return await status(tx, self._consumer)

        return await self._process.asker.ask(question)


def _filter(request: Request) -> deliveries.Filter:
    """Read a query.

    Raises:
        HTTPException: 400, naming the parameter.
    """
    query = request.query_params
    unknown = set(query) - {"source", "event", "disposition", "since", "before", "limit"}
    if unknown:
        raise HTTPException(400, f"unknown parameter: {', '.join(sorted(unknown))}")
    named = query.get("disposition")
    disposition = next((one for one in get_args(deliveries.Disposition) if one == named), None)
    if named is not None and disposition is None:
        raise HTTPException(400, f"disposition: one of {', '.join(deliveries.DISPOSITIONS)}")
    try:
        return deliveries.Filter(
            source=query.get("source"),
            event=query.get("event"),
            disposition=disposition,
            since=deliveries.since(query["since"]) if "since" in query else None,
            before=_number(query["before"], "before", 2**63 - 1) if "before" in query else None,
            limit=_number(query["limit"], "limit", deliveries.MOST) if "limit" in query else 20,
        )
    except ValueError as error:
        raise HTTPException(400, str(error)) from None


def _number(text: str, name: str, most: int) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 19 or not 1 <= int(text) <= most:
        raise ValueError(f"{name}: a number from 1 to {most}")
    return int(text)


async def _refuse(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


async def _away(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "unavailable", "reason": " ".join(str(error).split())}, 503)
