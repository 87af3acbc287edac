"""What happened to a row, which rows a person has to decide about, and the decisions, as JSON."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from webhooks import decision, escalation, why
from webhooks.consumer import Consumer
from webhooks.control import answers
from webhooks.control.health import Process
from webhooks.control.operations import Operation, read_body, read_query
from webhooks.db import Ready, Transaction
from webhooks.decision import NotEscalated, Told, as_result
from webhooks.errors import ConfigurationError
from webhooks.escalation import Escalated
from webhooks.why import Why

MOST = 1000


class Happened(BaseModel):
    """An effect that happened, and what the call returned."""

    model_config = ConfigDict(extra="forbid")

    done: JsonValue


class Retry(BaseModel):
    """The body of `POST /api/retry`; `effects` says by name what became of calls that nobody recorded an answer of."""

    model_config = ConfigDict(extra="forbid")

    row: str
    reason: str = Field(min_length=1)
    by: str = Field(default="the control plane", min_length=1)
    value: JsonValue = Field(default=None, description="what the phase is told, as `claim.decision.value`")
    effects: dict[str, Happened | Literal["not-done"]] = Field(
        default_factory=dict[str, "Happened | Literal['not-done']"]
    )


class Resolve(BaseModel):
    """The body of `POST /api/resolve`."""

    model_config = ConfigDict(extra="forbid")

    row: str
    to: str
    reason: str = Field(min_length=1)
    by: str = Field(default="the control plane", min_length=1)
    force: bool = Field(default=False, description="take a status that nothing names, too")


class EscalationQuery(BaseModel):
    """Which escalated rows to list."""

    model_config = ConfigDict(extra="forbid")

    table: str | None = Field(default=None, description="only those of this table")
    limit: int = Field(default=100, ge=1, le=MOST, description="how many of a table at most")


class Decisions:
    """Answers about escalated rows, and takes decisions.

    Args:
        process: whose worker is told of rows that are to run again.
        consumer: whose gates.
    """

    def __init__(self, process: Process, consumer: Consumer) -> None:
        self._process = process
        self._consumer = consumer

    def operations(self) -> list[Operation]:
        return [
            Operation(
                path="/api/why/{table}/{key:path}",
                endpoint=self.why,
                summary="Tell what happened to a row, and why a claim would be refused now",
                answers={200: answers.Why, 404: (answers.Why, answers.Error)},
            ),
            Operation(
                path="/api/escalations",
                endpoint=self.escalations,
                summary="List the rows that a person has to decide about, with what the person needs to know",
                query=EscalationQuery,
                answers={200: answers.Escalations},
            ),
            Operation(
                path="/api/retry",
                endpoint=self.retry,
                summary="Give an escalated row a new set of attempts, or apply a parked delivery now",
                method="POST",
                body=Retry,
                answers={200: answers.Decided},
            ),
            Operation(
                path="/api/resolve",
                endpoint=self.resolve,
                summary="Close an escalated row by hand, or a parked delivery as ignored",
                method="POST",
                body=Resolve,
                answers={200: answers.Decided},
            ),
        ]

    async def why(self, request: Request) -> Response:
        name = f"{request.path_params['table']}:{request.path_params['key']}"

        async def question(tx: Transaction) -> Why:
            return await why.why(tx, self._consumer, name, self._process.settings)

        try:
            found = await self._process.asker.ask(question)
        except ConfigurationError as error:
            raise HTTPException(404, str(error)) from None
        known = found.row is not None or found.timeline
        return JSONResponse(why.as_json(found), 200 if known else 404)

    async def escalations(self, request: Request) -> Response:
        query = read_query(request, EscalationQuery)

        async def question(tx: Transaction) -> list[Escalated]:
            return await escalation.escalated(tx, self._consumer, of=query.table, limit=query.limit)

        try:
            found = await self._process.asker.ask(question)
        except ConfigurationError as error:
            raise HTTPException(404, str(error)) from None
        return JSONResponse({"escalations": escalation.as_json(found)})

    async def retry(self, request: Request) -> Response:
        asked = await read_body(request, Retry)
        effects = {name: _told(said) for name, said in asked.effects.items()}
        moved: list[Ready] = []

        async def question(tx: Transaction) -> str:
            status = await decision.retry(
                tx,
                self._consumer,
                asked.row,
                decided_by=asked.by,
                reason=asked.reason,
                value=asked.value,
                effects=effects,
            )
            moved[:] = tx.moved
            return status

        status = await self._decided(question)
        self._know(moved)
        return JSONResponse({"row": asked.row, "status": status})

    async def resolve(self, request: Request) -> Response:
        asked = await read_body(request, Resolve)
        moved: list[Ready] = []

        async def question(tx: Transaction) -> str:
            told = {"decided_by": asked.by, "reason": asked.reason}
            await decision.resolve(tx, self._consumer, asked.row, to=asked.to, **told, force=asked.force)
            moved[:] = tx.moved
            return asked.to

        status = await self._decided(question)
        self._know(moved)
        return JSONResponse({"row": asked.row, "status": status})

    async def _decided(self, question: Callable[[Transaction], Awaitable[str]]) -> str:
        try:
            return await self._process.asker.ask(question)
        except NotEscalated as error:
            raise HTTPException(409, str(error)) from None
        except ConfigurationError as error:
            raise HTTPException(400, str(error)) from None

    def _know(self, moved: list[Ready]) -> None:
        if self._process.worker is not None:
            self._process.worker.know(moved)


def _told(said: Happened | Literal["not-done"]) -> Told:
    return Told(None if said == "not-done" else as_result(json.dumps(said.done)))
