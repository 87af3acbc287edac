"""Logs: one form for our lines and the libraries', on standard error, and no local variable of a traceback in them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from processes import environment

PROGRAM = """
import logging, sys
import psycopg, structlog
from webhooks.observe import configure_logging

configure_logging(json={json}, level=logging.INFO)
log = structlog.get_logger()

def fails(secret):
    raise ValueError("what went wrong")

log.debug("not shown")
log.info("ours", row="deliveries:1")
logging.getLogger("some.library").info("not shown either")
logging.getLogger("some.library").warning("theirs")
for tell in (log.error, logging.getLogger("uvicorn.error").error):
    try:
        fails("hun" + "ter2")
    except ValueError as error:
        tell("it failed", exc_info=error)
    try:
        raise psycopg.Error("a row was refused\\nDETAIL:  Failing row contains (hun" "ter2).")
    except psycopg.Error as error:
        tell(f"it failed: {{error}}", exc_info=error)
print("the answer")
"""


def logged(*, as_json: bool) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(json=as_json)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "the answer\n"
    assert "not shown" not in done.stderr
    return done.stderr


def test_json_lines_are_alike_whoever_wrote_them() -> None:
    ours, theirs, *failures = [json.loads(line) for line in logged(as_json=True).splitlines()]

    assert {key: value for key, value in ours.items() if key != "timestamp"} == {
        "event": "ours",
        "level": "info",
        "row": "deliveries:1",
    }
    assert (theirs["event"], theirs["level"], theirs["logger"]) == ("theirs", "warning", "some.library")
    assert ours["timestamp"].endswith("Z")
    assert [failure["event"] for failure in failures] == ["it failed", "it failed: a row was refused"] * 2
    for failure, error in zip(failures, ["ValueError: what went wrong", "Error: a row was refused"] * 2, strict=True):
        assert failure["exception"].endswith(error)


@pytest.mark.parametrize("as_json", [True, False])
def test_a_traceback_shows_no_local_variables_and_no_values_of_rows(as_json: bool) -> None:
    told = logged(as_json=as_json)

    assert told.count("ValueError: what went wrong") == 2
    assert "in fails" in told
    assert "hunter2" not in told


def test_a_line_that_cannot_be_written_stops_nothing() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(json=True)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            timeout=30,
            check=False,
        )
    assert (done.returncode, done.stdout) == (0, "the answer\n")
