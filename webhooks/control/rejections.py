"""Refused requests as JSON: what was refused and why, and verifying it again."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from webhooks import explanation, rejections, reverify
from webhooks.consumer import Consumer
from webhooks.control import answers
from webhooks.control.health import Process
from webhooks.control.inbox import LARGEST_ID, Time, moment
from webhooks.control.operations import Operation, read_body, read_query
from webhooks.db import Ready, Transaction
from webhooks.deliveries import as_json
from webhooks.errors import ConfigurationError, UnknownName
from webhooks.reverify import Verdict
from webhooks.selection import Names, unknown


class RejectionQuery(BaseModel):
    """Which refused requests."""

    model_config = ConfigDict(extra="forbid")

    source: str | None = Field(default=None, description="the source's name, in any letter case")
    cause: str | None = Field(default=None, description="why it was refused, such as `bad_signature`")
    since: Time | None = None
    before: int | None = Field(default=None, ge=1, le=LARGEST_ID, description="only ids below this: the next page")
    limit: int = Field(default=20, ge=1, le=rejections.MOST, description="how many at most")

    @property
    def filter(self) -> rejections.Filter:
        return rejections.Filter(
            source=self.source, cause=self.cause, since=moment(self.since), before=self.before, limit=self.limit
        )


class Reverify(BaseModel):
    """The body of `POST /api/rejections/reverify`; without `yes` it is only said what would become of them."""

    model_config = ConfigDict(extra="forbid")

    ids: list[int] | None = Field(default=None, description="only these")
    source: str | None = None
    cause: str | None = None
    since: Time | None = None
    ignore_age: bool = Field(default=False, description="accept also what was too old when it arrived")
    yes: bool = Field(default=False, description="do it")


class Rejections:
    """Answers about refused requests.

    Args:
        process: the way to the database; its worker is told of what is accepted.
        consumer: whose sources verify.
    """

    def __init__(self, process: Process, consumer: Consumer) -> None:
        self._process = process
        self._consumer = consumer
        # A long body takes a second: not in the loop that answers everybody, and not for several who look at once.
        self._explaining = ThreadPoolExecutor(1, "hints")

    def operations(self) -> list[Operation]:
        return [
            Operation(
                path="/api/rejections",
                endpoint=self.listed,
                summary="List refused requests, the newest first",
                query=RejectionQuery,
                answers={200: answers.Rejections},
            ),
            Operation(
                path="/api/rejections/kinds",
                endpoint=self.kinds,
                summary="Count what was refused by source and cause, each kind with hints at why",
                query=RejectionQuery,
                answers={200: answers.RejectionKinds},
            ),
            Operation(
                path="/api/rejections/{id:int}",
                endpoint=self.one,
                summary="Show one refused request with its headers, its body and hints at why",
                answers={200: answers.Rejection},
            ),
            Operation(
                path="/api/rejections/reverify",
                endpoint=self.reverify,
                summary="Verify refused requests again with the secrets of today, and accept those that are right",
                method="POST",
                body=Reverify,
                answers={200: answers.Reverified},
            ),
        ]

    async def listed(self, request: Request) -> Response:
        wanted = read_query(request, RejectionQuery).filter

        async def question(tx: Transaction) -> list[dict[str, Any]]:
            rows = await rejections.listed(tx, wanted)
            if not rows:
                await self._doubt(tx, wanted)
            return rows

        rows = await self._process.asker.ask(question)
        return JSONResponse({"rejections": [as_json(row) for row in rows]})

    async def kinds(self, request: Request) -> Response:
        wanted = read_query(request, RejectionQuery).filter

        async def question(tx: Transaction) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
            kinds = await rejections.kinds(tx, wanted)
            if not kinds:
                await self._doubt(tx, wanted)
            return [(kind, await rejections.one(tx, kind["example"])) for kind in kinds]

        found = await self._process.asker.ask(question)
        told = [{**as_json(kind), "hints": await self._hints(row)} for kind, row in found]
        return JSONResponse({"kinds": told})

    async def one(self, request: Request) -> Response:
        id = request.path_params["id"]

        async def question(tx: Transaction) -> dict[str, Any] | None:
            return await rejections.one(tx, id)

        row = await self._process.asker.ask(question) if id <= LARGEST_ID else None
        if row is None:
            raise HTTPException(404, f"there is no rejection {id}; the oldest ones are forgotten")
        plain = as_json({**row, "headers": [list(line) for line in row["headers"]]})
        return JSONResponse({**plain, "hints": await self._hints(row)})

    async def reverify(self, request: Request) -> Response:
        asked = await read_body(request, Reverify)
        wanted = rejections.Filter(source=asked.source, cause=asked.cause, since=moment(asked.since))
        secrets = self._known().in_force

        async def candidates(tx: Transaction) -> list[int]:
            found = await reverify.candidates(tx, wanted, asked.ids)
            if not found:
                await self._doubt(tx, wanted)
            return found

        async def judged(tx: Transaction) -> tuple[list[Verdict], list[Ready]]:
            verdicts = await reverify.reverify(
                tx, self._consumer, secrets, some, ignore_age=asked.ignore_age, dry=not asked.yes
            )
            return verdicts, tx.moved

        try:
            found = await self._process.asker.ask(candidates)
        except UnknownName:
            raise
        except ConfigurationError as error:
            raise HTTPException(404, str(error)) from None
        verdicts: list[Verdict] = []
        for start in range(0, len(found), reverify.AT_ONCE):
            some = found[start : start + reverify.AT_ONCE]
            told, moved = await self._process.asker.ask(judged)
            verdicts += told
            if self._process.worker is not None:
                self._process.worker.know(moved)
        return JSONResponse({"dry": not asked.yes, "rejections": [asdict(verdict) for verdict in verdicts]})

    async def _doubt(self, tx: Transaction, wanted: rejections.Filter) -> None:
        """Refuse a filter by a source or a cause that there is not."""
        await unknown(tx, self._consumer, Names(source=wanted.source, cause=wanted.cause))

    async def _hints(self, row: dict[str, Any] | None) -> list[str]:
        if row is None:
            return []
        loop, known = asyncio.get_running_loop(), self._known()
        return await loop.run_in_executor(self._explaining, explanation.explained, row, self._consumer.sources, known)

    def _known(self) -> explanation.Known:
        return explanation.known(self._consumer.sources, self._process.settings.home)
