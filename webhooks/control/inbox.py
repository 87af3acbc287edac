"""The inbox as JSON: which deliveries there are, and one with everything that is kept of it."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from webhooks import deliveries
from webhooks.consumer import Consumer
from webhooks.control import answers
from webhooks.control.health import Process
from webhooks.control.operations import Operation, read_query
from webhooks.db import Transaction
from webhooks.selection import Names, unknown

LARGEST_ID = 2**63 - 1


def _time(text: str) -> str:
    deliveries.since(text)
    return text


Time = Annotated[str, AfterValidator(_time), Field(description="`30m`, `2h`, `3d` ago, or a time in ISO 8601")]


class DeliveryQuery(BaseModel):
    """Which deliveries to list."""

    model_config = ConfigDict(extra="forbid")

    source: str | None = Field(default=None, description="the source's name, in any letter case")
    event: str | None = Field(default=None, description="a part of the event's name, in any letter case")
    disposition: deliveries.Disposition | None = Field(
        default=None, description="what became of it: what the command calls `--status`"
    )
    since: Time | None = None
    before: int | None = Field(default=None, ge=1, le=LARGEST_ID, description="only ids below this: the next page")
    limit: int = Field(default=20, ge=1, le=deliveries.MOST, description="how many at most")

    @property
    def filter(self) -> deliveries.Filter:
        return deliveries.Filter(
            source=self.source,
            event=self.event,
            disposition=self.disposition,
            since=moment(self.since),
            before=self.before,
            limit=self.limit,
        )


def moment(text: str | None) -> datetime | timedelta | None:
    """Read a time that a query's model has accepted."""
    return None if text is None else deliveries.since(text)


class Inbox:
    """Answers about deliveries.

    Args:
        process: the way to the database.
        consumer: whose sources and handlers a filter may name.
    """

    def __init__(self, process: Process, consumer: Consumer) -> None:
        self._process = process
        self._consumer = consumer

    def operations(self) -> list[Operation]:
        return [
            Operation(
                path="/api/deliveries",
                endpoint=self.listed,
                summary="List deliveries, the newest first",
                query=DeliveryQuery,
                answers={200: answers.Deliveries},
            ),
            Operation(
                path="/api/deliveries/{id:int}",
                endpoint=self.one,
                summary="Show one delivery with its headers, body, attempts and the events split from it",
                answers={200: answers.Delivery},
            ),
        ]

    async def listed(self, request: Request) -> Response:
        wanted = read_query(request, DeliveryQuery).filter

        async def question(tx: Transaction) -> tuple[list[dict[str, Any]], list[str]]:
            rows = await deliveries.listed(tx, wanted)
            names = Names(source=wanted.source, event=wanted.event)
            return rows, [] if rows else await unknown(tx, self._consumer, names)

        rows, notes = await self._process.asker.ask(question)
        return JSONResponse({"deliveries": [deliveries.as_json(row) for row in rows], "notes": notes})

    async def one(self, request: Request) -> Response:
        id = request.path_params["id"]

        async def question(tx: Transaction) -> dict[str, Any] | None:
            return await deliveries.one(tx, id)

        row = await self._process.asker.ask(question) if id <= LARGEST_ID else None
        if row is None:
            raise HTTPException(404, f"there is no delivery {id}")
        return JSONResponse(deliveries.as_json(row))
