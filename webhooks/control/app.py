"""The control plane's application: its paths, and the consumer's own behind the same checks."""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import version
from typing import Any

import psycopg
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from webhooks import observe
from webhooks.consumer import Consumer
from webhooks.control import answers
from webhooks.control.checks import Checks, is_trusted
from webhooks.control.decisions import Decisions
from webhooks.control.feed import Feed
from webhooks.control.health import OK, Process, Readiness
from webhooks.control.inbox import Inbox
from webhooks.control.metrics import show
from webhooks.control.operations import Operation, openapi
from webhooks.control.rejections import Rejections
from webhooks.control.replays import Replays
from webhooks.db import Transaction
from webhooks.errors import Unavailable, UnknownName
from webhooks.status import PhaseStatus, as_json, processes, status


class Control:
    """Answers about one process and its database.

    Args:
        process: what runs in it.
        consumer: whose gates are counted, and whose `routes` are served beside ours.

    Attributes:
        feed: to be told of accepts, stopped before the server is, and closed after it.
    """

    def __init__(self, process: Process, consumer: Consumer) -> None:
        self._process = process
        self._consumer = consumer
        self.feed = Feed(process.asker.pool, consumer)
        self._replays = Replays(process, consumer)
        self._readiness = Readiness(process)

    def stop(self) -> None:
        """End what goes on by itself, before the server is stopped: it waits for every answer."""
        self.feed.stop()
        self._replays.stop_all()

    async def close(self) -> None:
        """Leave the database, when nothing can ask any more."""
        await self._replays.close()
        await self.feed.close()

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
            Route("/api/openapi.json", self.description),
            *(operation.route() for operation in self.operations()),
            *self._consumer.routes,
        ]
        allowed = {*hosts, *settings.control_host_names}
        app = Starlette(
            routes=routes,
            middleware=[Middleware(Checks, token=settings.control_token, hosts=allowed)],
            exception_handlers={
                HTTPException: _refuse,
                UnknownName: _unknown,
                Unavailable: _away,
                psycopg.Error: _away,
            },
        )
        app.state.pool = self._process.asker.pool  # for the consumer's routes
        return app

    def operations(self) -> list[Operation]:
        """What the JSON API can be asked; the consumer's own routes are beside it, and not described."""
        return [
            Operation(
                path="/api/status",
                endpoint=self.status,
                summary="Count what waits, runs and needs a person, per phase, and list the processes that live",
                answers={200: answers.Status},
            ),
            *Inbox(self._process, self._consumer).operations(),
            *Decisions(self._process, self._consumer).operations(),
            *self._replays.operations(),
            *Rejections(self._process, self._consumer).operations(),
            *self.feed.operations(),
        ]

    async def description(self, request: Request) -> Response:
        return JSONResponse(openapi(self.operations(), version("webhooks"), answers.Error))

    async def healthz(self, request: Request) -> Response:
        return JSONResponse({"status": OK})

    async def readyz(self, request: Request) -> Response:
        trusted = is_trusted(request.scope)
        found = await self._readiness.look(trusted=trusted)
        return JSONResponse(found.as_json(trusted=trusted), 200 if found.ready else 503)

    async def metrics(self, request: Request) -> Response:
        try:
            show(await self._status())
        except (Unavailable, psycopg.Error):
            show(None)
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(observe.REGISTRY), headers={"content-type": content_type})

    async def status(self, request: Request) -> Response:
        async def question(tx: Transaction) -> dict[str, Any]:
            return as_json(await status(tx, self._consumer), await processes(tx))

        return JSONResponse(await self._process.asker.ask(question))

    async def _status(self) -> list[PhaseStatus]:
        async def question(tx: Transaction) -> list[PhaseStatus]:
            return await status(tx, self._consumer)

        return await self._process.asker.ask(question)


async def _refuse(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


async def _unknown(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 400)


async def _away(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "unavailable", "reason": " ".join(str(error).split())}, 503)
