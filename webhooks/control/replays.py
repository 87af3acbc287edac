"""Replays as JSON: shown first, done on request, followed and stopped while they run.

Only within the inbox of this consumer: a control plane that sent deliveries to any address would be a way around its
own checks.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import structlog
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from webhooks.consumer import Consumer
from webhooks.control import answers
from webhooks.control.health import Process
from webhooks.control.inbox import LARGEST_ID, Time, moment
from webhooks.control.operations import Operation, read_body
from webhooks.db import ended
from webhooks.deliveries import Disposition
from webhooks.errors import ConfigurationError
from webhooks.replay import Again, Limits, Plan, Report, again, planned
from webhooks.selection import JsonFilter, Names, Scope, Selection, unknown
from webhooks.text import describe

log = structlog.get_logger(__name__)

MOST_REMEMBERED = 100
MOST_AT_ONCE = 4


class ReplayRequest(BaseModel):
    """The body of `POST /api/replays`: which deliveries, and how they run again.

    Without `yes` it is only said what would be done. At least one filter is needed, or `all`.
    """

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    ids: list[Annotated[int, Field(ge=1, le=LARGEST_ID)]] = Field(
        default_factory=list[int], max_length=10_000, description="only these deliveries"
    )
    source: str | None = Field(default=None, description="the source's name, in any letter case")
    event: str | None = Field(default=None, description="a part of the event's name, in any letter case")
    disposition: Disposition | None = Field(
        default=None, description="what became of it: what the command calls `--status`"
    )
    since: Time | None = None
    until: Time | None = None
    row: str | None = Field(default=None, description="it moved this row, or waits for it: `table:key`")
    where_json: list[str] = Field(default_factory=list[str], description="`$.path=value`, in the notation of RFC 9535")
    limit: int | None = Field(default=None, ge=1, le=LARGEST_ID, description="the oldest so many at most")
    after: int = Field(default=0, ge=0, le=LARGEST_ID, description="only ids above this one: where one goes on")
    all: bool = Field(default=False, description="every delivery")
    how: Literal["same", "new"] = Field(
        default="same",
        alias="as",
        description="`same`: the delivery itself runs again. `new`: a copy of it, under a key of its own",
    )
    by: str = Field(default="the control plane", min_length=1, description="who wants it")
    reason: str = Field(default="replay", min_length=1, description="why")
    rate: float | None = Field(default=None, gt=0, allow_inf_nan=False, description="so many a second at most")
    yes: bool = Field(default=False, description="do it")
    wait: bool = Field(default=True, description="answer when it has ended; else at once, with its number")

    @property
    def selection(self) -> Selection:
        """The filters.

        Raises:
            ConfigurationError: a JSON filter cannot be read, or may take longer than a process that answers others has.
        """
        where_json = tuple(JsonFilter.read(text) for text in self.where_json)
        if any(each.has_pattern for each in where_json):
            raise ConfigurationError(
                "where_json: match() and search() may take for ever, and this process answers others as well: "
                "give such a filter to webhooks replay"
            )
        return Selection(
            ids=tuple(self.ids),
            source=self.source,
            event=self.event,
            disposition=self.disposition,
            since=moment(self.since),
            until=moment(self.until),
            row=self.row,
            where_json=where_json,
            limit=self.limit,
            after=self.after,
        )

    @property
    def chooses(self) -> bool:
        """Whether it says which."""
        named = (self.ids, self.source, self.event, self.disposition, self.since, self.until, self.row, self.where_json)
        return self.all or any(named) or bool(self.limit) or bool(self.after)


@dataclass(slots=True)
class _Run:
    """One replay of this process."""

    id: int
    request: Again
    limits: Limits
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    ended_at: datetime | None = None
    report: Report = field(default_factory=Report)
    error: str | None = None
    task: asyncio.Task[None] | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "as": self.request.how,
            "by": self.request.decided_by,
            "reason": self.request.reason,
            "started_at": self.started_at.isoformat(),
            "ended_at": None if self.ended_at is None else self.ended_at.isoformat(),
            "report": self.report.as_json(),
            "error": self.error,
        }


class Replays:
    """Runs replays, and answers about those of this process.

    Args:
        process: the connections.
        consumer: whose sources read the bodies that a JSON filter looks into.
    """

    def __init__(self, process: Process, consumer: Consumer) -> None:
        self._process = process
        self._consumer = consumer
        self._runs: dict[int, _Run] = {}
        self._numbers = itertools.count(1)

    def operations(self) -> list[Operation]:
        return [
            Operation(
                path="/api/replays",
                endpoint=self.start,
                summary="Run deliveries of the inbox again; without `yes`, say what would be done",
                method="POST",
                body=ReplayRequest,
                answers={200: (answers.Plan, answers.Replay), 202: answers.Replay},
            ),
            Operation(
                path="/api/replays",
                endpoint=self.listed,
                summary="List the replays that this process was asked for, the newest first",
                answers={200: answers.Replays},
            ),
            Operation(
                path="/api/replays/{id:int}",
                endpoint=self.one,
                summary="Show how a replay gets on",
                answers={200: answers.Replay},
            ),
            Operation(
                path="/api/replays/{id:int}/stop",
                endpoint=self.stop,
                summary="Stop a replay after the batch that is under way",
                method="POST",
                answers={202: answers.Replay},
            ),
        ]

    def stop_all(self) -> None:
        """Stop what runs, each after the batch that is under way."""
        for run in self._runs.values():
            run.limits.stop.set()

    async def close(self) -> None:
        """End what runs; what was run again stays so."""
        await ended([run.task for run in self._runs.values() if run.task is not None])

    async def start(self, request: Request) -> Response:
        asked = await read_body(request, ReplayRequest)
        if not asked.chooses:
            raise HTTPException(400, "say which: ids, a filter, or all")
        plan = await self._planned(asked)
        notes = [] if plan.total else await self._notes(asked)
        if not asked.yes:
            return JSONResponse({"plan": plan.as_json(), "notes": notes})
        if sum(run.ended_at is None for run in self._runs.values()) >= MOST_AT_ONCE:
            raise HTTPException(409, f"{MOST_AT_ONCE} replays are running already: wait for one, or stop one")
        run = self._begun(asked, plan.scope)
        if asked.wait and run.task is not None:
            await asyncio.shield(run.task)
            return JSONResponse(run.as_json())
        return JSONResponse(run.as_json(), 202)

    async def listed(self, request: Request) -> Response:
        return JSONResponse({"replays": [run.as_json() for run in reversed(self._runs.values())]})

    async def one(self, request: Request) -> Response:
        return JSONResponse(self._run(request.path_params).as_json())

    async def stop(self, request: Request) -> Response:
        run = self._run(request.path_params)
        run.limits.stop.set()
        return JSONResponse(run.as_json(), 202)

    def _run(self, path: Mapping[str, Any]) -> _Run:
        run = self._runs.get(path["id"])
        if run is None:
            raise HTTPException(404, f"this process knows of no replay {path['id']}")
        return run

    async def _planned(self, asked: ReplayRequest) -> Plan:
        pool = self._process.asker.pool
        unit: Literal["run", "request"] = "run" if asked.how == "same" else "request"
        try:
            return await planned(pool, self._consumer.sources, asked.selection, unit)
        except ConfigurationError as error:
            raise HTTPException(400, str(error)) from None

    async def _notes(self, asked: ReplayRequest) -> list[str]:
        names = Names(source=asked.source, event=asked.event, row=asked.row)
        async with self._process.asker.pool.transaction() as tx:
            return await unknown(tx, self._consumer, names)

    def _begun(self, asked: ReplayRequest, scope: Scope) -> _Run:
        request = Again(how=asked.how, decided_by=asked.by, reason=asked.reason)
        run = _Run(next(self._numbers), request, Limits(rate=asked.rate))
        ended = [id for id, one in self._runs.items() if one.ended_at is not None]
        for id in ended[: max(len(self._runs) + 1 - MOST_REMEMBERED, 0)]:
            del self._runs[id]
        self._runs[run.id] = run
        run.task = asyncio.create_task(self._done(run, scope), name=f"replay {run.id}")
        return run

    async def _done(self, run: _Run, scope: Scope) -> None:
        def progress(report: Report) -> None:
            run.report = report

        pool, sources = self._process.asker.pool, self._consumer.sources
        try:
            run.report = await again(pool, sources, scope, run.request, run.limits, progress)
        except Exception as error:  # whoever follows it is told
            run.error = describe(error)
            log.warning("a replay ended early", replay=run.id, error=run.error)
        finally:
            run.ended_at = datetime.now(UTC)
        if self._process.worker is not None:
            self._process.worker.look()
