"""`POST /api/heartbeat/run` on the control plane, and `GET /api/heartbeat/run/{id}` to see what became of a run."""

from __future__ import annotations

from typing import Annotated

import structlog
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from handlers.heartbeat import Unknown, Unusable, begin
from handlers.heartbeat_run import Run, Wanted
from handlers.texts import told
from webhooks import Pool

log = structlog.get_logger(__name__)

Name = Annotated[str, StringConstraints(min_length=1, max_length=500, pattern=r"^[^\x00]+$")]

MOST_BYTES = 64 * 1024

FIND = """
SELECT id AS run_id, company_id, agent_id, started_at, ended_at, claimed, resolved, failed, escalated, note
FROM heartbeat_runs WHERE id = %(id)s
"""


class HeartbeatRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    company_id: Name
    agent_id: Name | None = None
    limit: int | None = Field(default=None, ge=1, le=1_000_000)
    wait: bool = True


async def run_heartbeat(request: Request) -> Response:
    """Run one; answer when it has ended, or, with `wait` false, at once."""
    asked = _read(await _short(request))
    pool: Pool = request.app.state.pool
    try:
        run = await begin(pool, Wanted(asked.company_id, asked.agent_id, asked.limit))
    except Unknown as error:
        raise HTTPException(404, str(error)) from None
    except Unusable as error:
        raise HTTPException(422, str(error)) from None
    if not asked.wait:
        # The server holds on to it, gives it a while to end when the process stops, and then cancels it.
        return JSONResponse(_answer(run), 202, background=BackgroundTask(_unattended, run))
    counts = (await run.work()).counts()
    return JSONResponse(_answer(run) | counts)


async def _short(request: Request) -> bytes:
    """Return the body of a request.

    Raises:
        HTTPException: 413, it is longer than any request is.
    """
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise HTTPException(413, f"the body is longer than {MOST_BYTES} bytes")
    return body


def _answer(run: Run) -> dict[str, object]:
    answer: dict[str, object] = {"run_id": run.id}
    if run.problems:
        answer["problems"] = run.problems
    return answer


async def _unattended(run: Run) -> None:
    try:
        await run.work()
    except Exception as error:  # nobody waits for it any more; the run's own line says it, too
        log.error("a heartbeat failed", run=run.id, error=told(error))


async def show_run(request: Request) -> Response:
    pool: Pool = request.app.state.pool
    id: int = request.path_params["id"]
    async with pool.transaction() as tx:
        row = await (await tx.execute(FIND, {"id": id})).fetchone() if id < 2**63 else None
    if row is None:
        raise HTTPException(404, f"there is no run {id}")
    times = {name: None if row[name] is None else row[name].isoformat() for name in ("started_at", "ended_at")}
    return JSONResponse({**row, **times})


def _read(body: bytes) -> HeartbeatRequest:
    """Read a request's body.

    Raises:
        HTTPException: 400, saying what is wrong with which field.
    """
    try:
        return HeartbeatRequest.model_validate_json(body)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        told = "; ".join(f"{'.'.join(map(str, fault['loc'])) or 'the body'}: {fault['msg']}" for fault in faults)
        raise HTTPException(400, told) from None


heartbeat_routes = [
    Route("/api/heartbeat/run", run_heartbeat, methods=["POST"]),
    Route("/api/heartbeat/run/{id:int}", show_run, methods=["GET"]),
]
