"""What happened to a row, which rows a person has to decide about, and the decisions, as JSON."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from webhooks import decision, escalation, why
from webhooks.consumer import Consumer
from webhooks.control.health import Process
from webhooks.db import Ready, Transaction
from webhooks.decision import NotEscalated, Told, as_result
from webhooks.errors import ConfigurationError
from webhooks.escalation import Escalated
from webhooks.why import Why

MOST_BYTES = 1024 * 1024
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


Body = TypeVar("Body", bound=BaseModel)


class Decisions:
    """Answers about escalated rows, and takes decisions.

    Args:
        process: whose worker is told of rows that are to run again.
        consumer: whose gates.
    """

    def __init__(self, process: Process, consumer: Consumer) -> None:
        self._process = process
        self._consumer = consumer

    def routes(self) -> list[Route]:
        return [
            Route("/api/why/{table}/{key:path}", self.why),
            Route("/api/escalations", self.escalations),
            Route("/api/retry", self.retry, methods=["POST"]),
            Route("/api/resolve", self.resolve, methods=["POST"]),
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
        query = request.query_params
        if unknown := sorted(set(query) - {"table", "limit"}):
            raise HTTPException(400, f"unknown parameter: {', '.join(unknown)}")
        text = query.get("limit", "100")
        if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= MOST):
            raise HTTPException(400, f"limit: a number from 1 to {MOST}")

        async def question(tx: Transaction) -> list[Escalated]:
            return await escalation.escalated(tx, self._consumer, of=query.get("table"), limit=int(text))

        try:
            found = await self._process.asker.ask(question)
        except ConfigurationError as error:
            raise HTTPException(404, str(error)) from None
        return JSONResponse({"escalations": escalation.as_json(found)})

    async def retry(self, request: Request) -> Response:
        asked = await _read(request, Retry)
        effects = {name: _told(said) for name, said in asked.effects.items()}
        moved: list[Ready] = []

        async def question(tx: Transaction) -> str:
            status = await decision.retry(
                tx, self._consumer, asked.row, decided_by=asked.by, reason=asked.reason, effects=effects
            )
            moved[:] = tx.moved
            return status

        status = await self._decided(question)
        self._know(moved)
        return JSONResponse({"row": asked.row, "status": status})

    async def resolve(self, request: Request) -> Response:
        asked = await _read(request, Resolve)
        moved: list[Ready] = []

        async def question(tx: Transaction) -> str:
            await decision.resolve(tx, self._consumer, asked.row, to=asked.to, decided_by=asked.by, reason=asked.reason)
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


async def _read(request: Request, model: type[Body]) -> Body:
    """Read a body.

    Raises:
        HTTPException: it is too long, or not what the model says; the message names the field.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BYTES:
            raise HTTPException(413, f"more than {MOST_BYTES} bytes")
    try:
        return model.model_validate_json(bytes(body))
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        told = [f"{'.'.join(map(str, fault['loc'])) or 'the body'}: {fault['msg']}" for fault in faults[:5]]
        raise HTTPException(400, "; ".join(told)) from None


def _told(said: Happened | Literal["not-done"]) -> Told:
    return Told(None if said == "not-done" else as_result(json.dumps(said.done)))
