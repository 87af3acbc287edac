"""Agents: who resolves issues, and how each is called, as the column `agents.adapter` says.

::

    {"type": "http", "url": "https://…", "headers": {…}, "token_env": "CODER_TOKEN", "timeout_s": 300, "concurrency": 1}
    {"type": "process", "command": ["python", "agent.py"], "cwd": "/srv/agent", "timeout_s": 300, "concurrency": 1}

Only `type` and `url`, or `command`, are needed. Whatever else stands there is refused: a misspelt setting must not
silently count as its default.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, HttpUrl, StringConstraints, TypeAdapter, ValidationError

from handlers.issues import LONGEST_CALL

HeaderName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")]
HeaderValue = Annotated[str, StringConstraints(pattern=r"^[\x20-\x7e]*$")]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    timeout_s: float = Field(default=300, gt=0, le=LONGEST_CALL.total_seconds(), allow_inf_nan=False)
    """How long one call may take."""
    concurrency: int = Field(default=1, ge=1, le=100)
    """How many of its issues a run gives the agent at once."""


class HttpAdapter(_Settings):
    """The issue is posted as JSON to `url`; the answer is 2xx with a JSON result."""

    type: Literal["http"]
    url: HttpUrl
    headers: dict[HeaderName, HeaderValue] = {}
    token_env: str | None = Field(default=None, min_length=1)
    """The environment variable whose value goes along as a bearer token, so that it need not be in the database."""


class ProcessAdapter(_Settings):
    """`command` reads the issue as JSON from standard input and prints a JSON result."""

    type: Literal["process"]
    command: list[str] = Field(min_length=1)
    cwd: Path | None = None


Adapter: TypeAlias = Annotated[HttpAdapter | ProcessAdapter, Field(discriminator="type")]
_ADAPTER: TypeAdapter[HttpAdapter | ProcessAdapter] = TypeAdapter(Adapter)


@dataclass(frozen=True, slots=True)
class Agent:
    id: str
    adapter: HttpAdapter | ProcessAdapter


def read_agents(rows: Iterable[Mapping[str, Any]]) -> tuple[list[Agent], list[str]]:
    """Read rows of `agents`.

    Returns:
        The agents, and for each whose settings cannot be read a sentence that says why.
    """
    agents: list[Agent] = []
    problems: list[str] = []
    for row in rows:
        try:
            agents.append(Agent(row["id"], _ADAPTER.validate_python(row["adapter"])))
        except ValidationError as error:
            problems.append(f"agent {row['id']}: its adapter cannot be read: {_told(error)}")
    return agents, problems


def _told(error: ValidationError) -> str:
    """Which settings are wrong and how, without their values: a header may hold a secret."""
    faults = error.errors(include_url=False, include_input=False)
    # The place begins with the adapter's type, which says nothing new.
    return "; ".join(f"{'.'.join(map(str, fault['loc'][1:])) or 'type'}: {fault['msg']}" for fault in faults)
