"""The stand-in's agents: every name is one, and resolves whatever issue it is given.

They honour the idempotency key: a call with a key that was accepted before is answered as it was then, and nothing is
done again. With `?failing=20` a fifth of the calls fail, half of these only after the work is done, as calls do whose
answer is lost; with `?seconds=0.5` the work takes that long.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, Field, TypeAdapter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

MOST_REMEMBERED = 100_000
SECONDS = 0.05

_PERCENT: TypeAdapter[float] = TypeAdapter(Annotated[float, Field(ge=0, le=100)])
_SECONDS: TypeAdapter[float] = TypeAdapter(Annotated[float, Field(ge=0, le=3600)])


class Task(BaseModel):
    """What it reads of the issue it is posted."""

    id: int
    title: str
    claim: int


@dataclass(frozen=True, slots=True)
class Call:
    """One call as it came in.

    Args:
        agent: whose it was.
        key: its idempotency key.
        issue: what it was about.
        claim: the number of the claim that made it.
    """

    agent: str
    key: str
    issue: int
    claim: int


class AgentStandin:
    """Agents that remember what they did.

    Attributes:
        calls: every call, in the order of arrival; the newest only, past a hundred thousand.
        accepted: how often work was done for each idempotency key.
    """

    def __init__(self, chance: random.Random | None = None) -> None:
        self.calls: list[Call] = []
        self.accepted: dict[str, int] = {}
        self._answers: dict[str, asyncio.Task[dict[str, str]]] = {}
        self._chance = chance or random.Random()

    def routes(self) -> list[Route]:
        return [Route("/{name}", self.work, methods=["POST"]), Route("/", self.show, methods=["GET"])]

    async def close(self) -> None:
        """Stop what is being worked on."""
        tasks = list(self._answers.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def work(self, request: Request) -> JSONResponse:
        key = request.headers.get("idempotency-key")
        if not key:
            raise HTTPException(400, "an Idempotency-Key is needed, so that nothing is done twice")
        task = Task.model_validate_json(await request.body())
        name: str = request.path_params["name"]
        failing = _PERCENT.validate_python(request.query_params.get("failing", 0)) / 100
        seconds = _SECONDS.validate_python(request.query_params.get("seconds", SECONDS))
        self.calls.append(Call(name, key, task.id, task.claim))
        del self.calls[:-MOST_REMEMBERED]
        fails = self._chance.random() < failing
        if fails and self._chance.random() < 0.5:
            raise HTTPException(503, "not just now")
        if key not in self._answers:
            # Not this request's own task: a caller that goes away does not stop the work, and so need not repeat it.
            self.accepted[key] = self.accepted.get(key, 0) + 1
            self._answers[key] = asyncio.create_task(self._resolve(name, task, seconds))
            if len(self._answers) > MOST_REMEMBERED:
                oldest = next(iter(self._answers))
                del self._answers[oldest], self.accepted[oldest]
        try:
            answer = await asyncio.shield(self._answers[key])
        except asyncio.CancelledError:
            if not self._answers[key].cancelled():
                raise
            raise HTTPException(503, "stopped") from None
        if fails:
            raise HTTPException(500, "the work is done, but the answer is lost")
        return JSONResponse(answer)

    async def show(self, request: Request) -> JSONResponse:
        """What they did: how many calls came in, and for how many keys they worked, once each."""
        return JSONResponse({"calls": len(self.calls), "accepted": sum(self.accepted.values())})

    async def _resolve(self, name: str, task: Task, seconds: float) -> dict[str, str]:
        await asyncio.sleep(seconds)
        return {"summary": f"{name} looked into “{task.title}” and mended it."}
