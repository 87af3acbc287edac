"""`webhooks serve` and `webhooks work` as processes: how they start, refuse to start, and stop."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import split
from typing import Any, LiteralString
from urllib.parse import urlsplit

import httpx
import psutil
import psycopg
import pytest
from processes import SECRETS, Process, answering, empty_database, environment, eventually, serving, started, webhooks
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import dict_row

PORTS = ("--port", "0", "--control-port", "0")


def rows(url: str, query: LiteralString) -> list[dict[str, Any]]:
    with psycopg.connect(url, autocommit=True, row_factory=dict_row) as connection:
        cursor = connection.execute(query)
        return cursor.fetchall() if cursor.description else []


def one(url: str, query: LiteralString) -> Any:
    """The only value of the only row, None for no row."""
    found = rows(url, query)
    return next(iter(found[0].values())) if found else None


def trigger(process: Process, *arguments: str) -> str:
    done = webhooks(process.cwd, "trigger", *arguments, "--url", process.receiver, **SECRETS)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- the way of a delivery


def test_a_delivery_sent_fifty_times_opens_one_session_whose_phase_runs_once(database_url: str, tmp_path: Path) -> None:
    with serving(tmp_path, database_url) as process:
        answers = trigger(process, "shortcut", "story.update", "--times", "50")
        eventually(lambda: one(database_url, "SELECT status FROM patch_sessions") == "clarified")

    # Which number it gets is open: copies that meet in the database may use one up.
    [number] = {row["id"] for row in rows(database_url, "SELECT id FROM deliveries")}
    assert f"202 delivery: {number}  status: accepted\n" in answers
    assert f"200 delivery: {number}  status: duplicate  (49 times)" in answers
    attempts = rows(database_url, "SELECT phase, outcome FROM attempts ORDER BY claim_seq")
    assert attempts == [{"phase": "applying", "outcome": "done"}, {"phase": "clarifying", "outcome": "done"}]


def test_the_log_has_a_line_for_what_was_applied_and_what_a_phase_did(database_url: str, tmp_path: Path) -> None:
    with serving(tmp_path, database_url, WEBHOOKS_LOG_LEVEL="debug") as process:
        trigger(process, "shortcut", "story.update", "--set", "actions.0.id=7")
        process.says('"row": "patch_sessions:7"')
        told = [json.loads(line) for line in process.log.splitlines()]

    assert [(line["row"], line["phase"]) for line in told if line["event"] == "completed"] == [
        ("deliveries:1", "applying"),
        ("patch_sessions:7", "clarifying"),
    ]
    assert [line["delivery"] for line in told if line["event"] == "accepted"] == [1]


def test_the_control_plane_serves_the_consumers_own_routes(database_url: str, tmp_path: Path) -> None:
    with serving(tmp_path, database_url, "--no-worker") as process:
        assert httpx.get(f"{process.control}/hello").text == "hello"
        assert httpx.get(f"{process.control}/hello", headers={"X-Forwarded-For": "192.0.2.7"}).status_code == 403
        assert httpx.get(f"{process.receiver}/hello").status_code == 404


def test_without_a_worker_deliveries_are_kept_for_another_process(database_url: str, tmp_path: Path) -> None:
    with serving(tmp_path, database_url, "--no-worker") as process:
        assert process.checks() == {"database": "ok", "schema": "ok", "inbox": "ok"}
        trigger(process, "shortcut", "story.update")
        assert one(database_url, "SELECT status FROM deliveries") == "received"
        # Polled every 50 seconds: what the worker finds sooner, it was told of.
        with started(tmp_path, "work", name="work", DATABASE_URL=database_url, WEBHOOKS_POLL_S="50") as worker:
            worker.says("worker for patch_sessions")
            eventually(lambda: one(database_url, "SELECT status FROM patch_sessions") == "clarified")
            trigger(process, "shortcut", "story.update")
            eventually(lambda: one(database_url, "SELECT count(*) FROM patch_sessions WHERE status = 'clarified'") == 2)
            worker.signal()
            assert worker.ends() == 0


def test_deliveries_ignored_for_want_of_a_handler_that_is_there_now_are_told_of(
    database_url: str, tmp_path: Path
) -> None:
    rows(
        database_url,
        "INSERT INTO deliveries (source, dedup_key, body, event, status, reason) VALUES"
        " ('shortcut', 'a', '', 'story.update', 'ignored', 'no handler for story.update'),"
        " ('shortcut', 'b', '', 'epic.update, story.update', 'ignored', 'no handler for epic.update, story.update'),"
        " ('shortcut', 'c', '', 'epic.update', 'ignored', 'no handler for epic.update'),"
        " ('shortcut', 'd', '', 'story.update', 'ignored', 'not the label')",
    )
    with serving(tmp_path, database_url) as process:
        process.says("have the provider redeliver them")
        eventually(lambda: process.log.count("have the provider redeliver them") == 2)
        told = [json.loads(line) for line in process.log.splitlines() if "have the provider redeliver them" in line]

    assert {(line["deliveries_event"], line["deliveries"]) for line in told} == {
        ("story.update", 1),
        ("epic.update, story.update", 1),
    }


def test_the_command_that_is_told_with_them_runs_ignored_deliveries_again(database_url: str, tmp_path: Path) -> None:
    with serving(tmp_path, database_url) as process:
        trigger(process, "shortcut", "story.update", "--set", "actions.0.id=7")
        eventually(lambda: one(database_url, "SELECT status FROM deliveries") == "processed")
    rows(
        database_url,
        "UPDATE deliveries SET status = 'ignored', event = 'it''s, story.update',"
        " reason = 'no handler for it''s, story.update'",
    )
    rows(database_url, "DELETE FROM patch_sessions")
    with serving(tmp_path, database_url) as process:
        process.says("ignored for want of a handler")
        [told] = [json.loads(line) for line in process.log.splitlines() if "for want of a handler" in line]
        assert told["run"] == (
            "webhooks replay --app shop:consumer --status ignored --source shortcut "
            """--event 'it'"'"'s, story.update' --yes"""
        )
        listed = webhooks(tmp_path, *split(told["list"])[1:], "--json", DATABASE_URL=database_url)
        assert [row["disposition"] for row in json.loads(listed.stdout)] == ["ignored"]
        done = webhooks(tmp_path, *split(told["run"])[1:], DATABASE_URL=database_url)
        assert (done.returncode, done.stdout.split()) == (0, ["1", "run", "again"]), done.stderr
        eventually(lambda: one(database_url, "SELECT status FROM deliveries") == "processed")
        assert one(database_url, "SELECT sc_id FROM patch_sessions") == 7


def test_deliveries_with_the_numbers_of_another_server_are_in_the_feed_soon(database_url: str, tmp_path: Path) -> None:
    """A dump that was restored here brings them."""
    rows(
        database_url,
        "INSERT INTO deliveries (source, dedup_key, body, accepted_xid, status)"
        " VALUES ('shortcut', 'a', '', '9000000000', 'processed')",
    )
    with serving(tmp_path, database_url, "--no-worker") as process:
        waiting = f"{process.control}/api/feed/waiting?after=all"
        eventually(lambda: httpx.get(waiting).json()["waiting"] == 1)
        process.says("restored from another server")


# ---- how it stops


def test_sigterm_takes_no_more_lets_running_work_end_and_exits_with_0(database_url: str, tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.touch()
    with serving(tmp_path, database_url) as process:
        receiver, control = process.receiver, process.control
        trigger(process, "shortcut", "story.update")
        eventually((tmp_path / "running").exists)
        process.signal()
        process.says("draining")
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{receiver}/healthz")
        assert httpx.get(f"{control}/readyz").status_code == 503
        assert process.alive
        held.unlink()
        assert process.ends() == 0

    assert one(database_url, "SELECT status FROM patch_sessions") == "clarified"
    assert one(database_url, "SELECT count(*) FROM attempts WHERE outcome IS DISTINCT FROM 'done'") == 0
    assert "Traceback" not in process.log


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_cuts_the_drain_short_and_the_row_goes_back_uncharged(
    database_url: str, tmp_path: Path, second: signal.Signals
) -> None:
    (tmp_path / "held").touch()
    with serving(tmp_path, database_url) as process:
        trigger(process, "shortcut", "story.update")
        eventually((tmp_path / "running").exists)
        process.signal()
        process.says("draining")
        process.signal(second)
        assert process.ends(10) == 0

    [session] = rows(database_url, "SELECT status, attempt_count, lease_until FROM patch_sessions")
    assert session == {"status": "received", "attempt_count": 0, "lease_until": None}
    assert one(database_url, "SELECT outcome FROM attempts WHERE phase = 'clarifying'") == "interrupted"


def test_a_hang_up_ends_it_in_order_unless_it_was_ignored_on_start(database_url: str, tmp_path: Path) -> None:
    with answering(signal.SIGHUP, signal.SIG_IGN), serving(tmp_path, database_url) as process:
        process.signal(signal.SIGHUP)
        trigger(process, "shortcut", "story.update")
        eventually(lambda: one(database_url, "SELECT status FROM patch_sessions") == "clarified")
        process.signal()
        assert process.ends() == 0
        assert "SIGHUP" not in process.log

    (tmp_path / "running").unlink()
    (tmp_path / "held").touch()
    with answering(signal.SIGHUP, signal.SIG_DFL), serving(tmp_path, database_url) as process:
        trigger(process, "shortcut", "story.update", "--set", "actions.0.id=7")
        eventually((tmp_path / "running").exists)
        process.signal(signal.SIGHUP)
        process.says("draining")
        process.signal(signal.SIGHUP)
        assert process.ends(10) == 0
    assert one(database_url, "SELECT status FROM patch_sessions WHERE sc_id = 7") == "received"


ON_A_TERMINAL = """
import os, sys
os.login_tty(int(sys.argv[1]))
os.execv(sys.executable, [sys.executable, "-m", "webhooks", *sys.argv[2:]])
"""


def test_a_terminal_that_is_closed_ends_it_in_order_though_nothing_can_be_written_there(
    database_url: str, tmp_path: Path
) -> None:
    (tmp_path / "held").touch()
    ours, theirs = os.openpty()
    variables = environment(DATABASE_URL=database_url, **SECRETS)
    command = [sys.executable, "-c", ON_A_TERMINAL, str(theirs), "serve", *PORTS]
    with answering(signal.SIGHUP, signal.SIG_DFL):
        process = subprocess.Popen(command, cwd=tmp_path, env=variables, pass_fds=(theirs,))
    try:
        os.close(theirs)
        said = b""
        while not (found := re.search(rb"receiver +(http://\S+)", said)) or b"control plane  http" not in said:
            said += os.read(ours, 4096)
        webhooks(tmp_path, "trigger", "shortcut", "story.update", "--url", found[1].decode(), **SECRETS)
        eventually((tmp_path / "running").exists)
        os.close(ours)
        eventually(lambda: not _listens(found[1].decode()))
        (tmp_path / "held").unlink()
        process.wait(20)
    finally:
        process.kill()
        process.wait(10)
    assert one(database_url, "SELECT status FROM patch_sessions") == "clarified"


def _listens(url: str) -> bool:
    try:
        httpx.get(f"{url}/healthz")
    except httpx.ConnectError:
        return False
    return True


def test_work_that_does_not_end_within_the_drain_time_goes_back(database_url: str, tmp_path: Path) -> None:
    (tmp_path / "held").touch()
    with serving(tmp_path, database_url, WEBHOOKS_DRAIN_S="0.2") as process:
        trigger(process, "shortcut", "story.update")
        eventually((tmp_path / "running").exists)
        process.signal(signal.SIGINT)
        assert process.ends(10) == 0

    assert one(database_url, "SELECT status FROM patch_sessions") == "received"


def test_a_request_whose_sender_never_ends_it_does_not_keep_the_process_and_is_answered_503(
    database_url: str, tmp_path: Path
) -> None:
    with serving(tmp_path, database_url) as process:
        target = urlsplit(process.receiver)
        with socket.create_connection((target.hostname, target.port or 0), timeout=20) as sender:
            sender.sendall(b"POST /webhooks/shortcut HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nhalf")
            eventually(lambda: "ESTABLISHED" in {c.status for c in psutil.Process(process.pid).net_connections()})
            process.signal()
            answer = b"".join(iter(lambda: sender.recv(65536), b""))
        assert process.ends() == 0

    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b'{"error":"stopping"}' in answer
    assert "Traceback" not in process.log


def test_a_signal_while_it_waits_for_the_database_ends_it_with_0(tmp_path: Path) -> None:
    with closed_port() as port:
        url = f"postgresql://nobody@127.0.0.1:{port}/nothing"
        with started(tmp_path, "serve", *PORTS, DATABASE_URL=url, **SECRETS) as process:
            process.says("the database does not answer yet")
            process.signal()
            assert process.ends(10) == 0


# ---- how it refuses to start


def refused(cwd: Path, *arguments: str, **variables: str) -> str:
    """Start what cannot start, and return the one line it says."""
    done = webhooks(cwd, *arguments, **variables)
    assert done.returncode == 1
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("webhooks: ")
    assert "Traceback" not in done.stderr
    return last


@contextmanager
def closed_port() -> Iterator[int]:
    """A port on which nobody answers, and which nobody else can take meanwhile."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


@pytest.mark.parametrize("option", ["--port", "--control-port"])
def test_a_port_that_is_taken_is_named_before_anything_is_started(tmp_path: Path, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        # There is no such database: it was not asked.
        said = refused(tmp_path, "serve", *PORTS, option, str(port), DATABASE_URL="postgresql://nowhere/x", **SECRETS)

    assert said == (
        f"webhooks: port {port} on 127.0.0.1 is taken: stop what listens there, or choose another with {option}"
    )


def test_an_address_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    assert "cannot listen on 192.0.2.7" in refused(tmp_path, "serve", *PORTS, "--host", "192.0.2.7", **SECRETS)


def test_a_source_without_a_secret_is_refused_naming_its_variable(database_url: str, tmp_path: Path) -> None:
    said = refused(tmp_path, "serve", *PORTS, DATABASE_URL=database_url, WEBHOOKS_SECRET_SHORTCUT="a secret")

    assert "no secret for github: set WEBHOOKS_SECRET_GITHUB" in said
    assert "webhooks serve --dev" in said


def test_a_schema_that_is_behind_is_refused_naming_the_command(empty_url: str, tmp_path: Path) -> None:
    for command in (("serve", *PORTS), ("work",)):
        said = refused(tmp_path, *command, DATABASE_URL=empty_url, **SECRETS)
        assert said.endswith("run: webhooks migrate")
        assert "1 (gate and inbox)" in said


def test_a_gated_table_without_its_index_is_refused_with_the_statement_to_run(
    database_url: str, tmp_path: Path
) -> None:
    rows(database_url, "DROP INDEX patch_sessions_received")

    done = webhooks(tmp_path, "serve", *PORTS, DATABASE_URL=database_url, **SECRETS)

    assert done.returncode == 1
    assert "the tables do not fit their gates" in done.stderr
    assert "CREATE INDEX" in done.stderr
    assert "patch_sessions" in done.stderr


def test_an_address_that_cannot_be_read_is_refused_without_repeating_it(tmp_path: Path) -> None:
    said = refused(tmp_path, "serve", *PORTS, DATABASE_URL="user:hunter2@somewhere", **SECRETS)

    assert "DATABASE_URL" in said
    assert "hunter2" not in said


@pytest.fixture
def empty_url(server_url: str) -> Iterator[str]:
    with empty_database(server_url) as url:
        yield url


# ---- a database that comes and goes


def test_it_waits_for_a_database_that_is_not_there_yet(database_url: str, tmp_path: Path) -> None:
    target = conninfo_to_dict(database_url)
    directory = str(target["host"])
    if not directory.startswith("/"):
        pytest.skip("the server is not on a socket of this machine")
    with tempfile.TemporaryDirectory(prefix="later-") as later:
        url = make_conninfo(database_url, host=later)
        with started(tmp_path, "serve", *PORTS, DATABASE_URL=url, **SECRETS) as process:
            process.says("the database does not answer yet")
            name = f".s.PGSQL.{target.get('port', '5432')}"
            Path(later, name).symlink_to(Path(directory, name))
            eventually(lambda: process.checks().get("worker") == "ok")
            process.signal()
            assert process.ends() == 0


# ---- --dev, on an embedded server


def test_dev_makes_secrets_prints_them_with_a_command_and_runs_on_an_embedded_server_that_it_keeps_alive() -> None:
    # Not pytest's own directory: as root, the server's own user could not pass through it.
    with tempfile.TemporaryDirectory(prefix="webhooks-dev-") as directory:
        cwd = Path(directory)
        with started(cwd, "serve", "--dev", *PORTS) as process:
            process.says("try it")
            for source in ("shortcut", "github"):
                kept = cwd / ".webhooks" / "secrets" / source
                secret = kept.read_text().strip()
                assert (
                    f"{process.receiver}/webhooks/{source}  secret {secret} (kept in .webhooks/secrets/{source})"
                    in (process.output)
                )
                assert stat.S_IMODE(kept.stat().st_mode) == 0o600
            assert "dev began\n" in process.output
            shown = process.output.partition("try it")[2].strip()
            options = f"--app shop:consumer --url {process.receiver}"
            assert shown.endswith(f"-m webhooks trigger shortcut story.update {options}")
            # As it was printed, without any secret in the environment.
            done = webhooks(cwd, *shown.partition("-m webhooks ")[2].split())
            assert done.stdout == "202 delivery: 1  status: accepted\n"

            # The server dies, and runs again.
            eventually(lambda: process.checks().get("worker") == "ok")
            postmaster = int((cwd / ".webhooks/postgres/postmaster.pid").read_text().splitlines()[0])
            os.kill(postmaster, signal.SIGKILL)
            process.says("was gone and runs again")

            def accepted() -> bool:
                again = webhooks(cwd, "trigger", "shortcut", "story.update", "--url", process.receiver)
                return again.returncode == 0

            eventually(accepted, 30)
            eventually(lambda: set(process.checks().values()) == {"ok"}, 30)
            process.signal()
            assert process.ends() == 0
            assert "dev ended\n" in process.output

        assert not [each for each in psutil.process_iter() if directory in " ".join(_command(each))]
        # What the server left is read by a command of its own.
        shown = webhooks(cwd, "status", "--json").stdout
        assert {line["table"] for line in json.loads(shown)["phases"]} == {"deliveries", "patch_sessions"}
        assert not [each for each in psutil.process_iter() if directory in " ".join(_command(each))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


# ---- --reload


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def test_reload_starts_again_when_a_file_changes_and_survives_one_that_is_wrong(
    database_url: str, tmp_path: Path
) -> None:
    app = tmp_path / "own_shop.py"
    text = "from shop import consumer as consumer\nprint('version {}', flush=True)\n"
    app.write_text(text.format(1))
    (tmp_path / ".venv").mkdir()
    ports = ("--port", str(free_port()), "--control-port", str(free_port()))
    variables = {"DATABASE_URL": database_url, "WEBHOOKS_APP": "own_shop:consumer", **SECRETS}
    with started(tmp_path, "serve", "--reload", *ports, **variables) as process:
        process.says("version 1")
        process.says("control plane  http://")
        app.write_text(text.format(2))
        process.says("own_shop.py changed")
        process.says("version 2")
        app.write_text("this is no python\n")
        process.says("SyntaxError")
        process.says("the next change of a file starts it again")
        (tmp_path / ".venv" / "not_ours.py").touch()
        app.write_text(text.format(3))
        process.says("version 3")
        eventually(lambda: process.checks().get("worker") == "ok")
        process.signal(signal.SIGINT)
        assert process.ends() == 0

    assert process.output.count("version") == 3


@pytest.mark.invariant(6)
def test_a_row_is_free_once_the_process_is_gone_whose_thread_worked_for_it_past_the_drain(
    database_url: str, tmp_path: Path
) -> None:
    (tmp_path / "held").touch()
    (tmp_path / "threaded").touch()
    with serving(tmp_path, database_url, WEBHOOKS_DRAIN_S="0.2", WEBHOOKS_LEASE_S="2") as process:
        trigger(process, "shortcut", "story.update", "--set", "actions.0.id=7")
        eventually((tmp_path / "running").exists)
        process.signal()
        process.says("the row stays claimed")
        assert one(database_url, "SELECT status FROM patch_sessions") == "clarifying"
        assert process.ends(60) == 1
        [row] = rows(
            database_url,
            "SELECT status, attempt_count, not_before > clock_timestamp() AS rests FROM patch_sessions",
        )
        assert row == {"status": "received", "attempt_count": 0, "rests": True}
        assert one(database_url, "SELECT outcome FROM attempts WHERE phase = 'clarifying'") == "interrupted"
        assert "patch_sessions:7" in process.log.splitlines()[-1]


def test_a_handler_that_ignores_its_cancellation_does_not_keep_the_process(database_url: str, tmp_path: Path) -> None:
    (tmp_path / "held").touch()
    (tmp_path / "stubborn").touch()
    with serving(tmp_path, database_url, WEBHOOKS_DRAIN_S="0.2") as process:
        trigger(process, "shortcut", "story.update", "--set", "actions.0.id=7")
        eventually((tmp_path / "running").exists)
        process.signal(signal.SIGTERM)
        assert process.ends(60) == 1
        assert "patch_sessions:7 clarifying" in process.log


# ---- where it listens, and how it leaves


def test_it_listens_on_several_addresses_and_a_path_and_says_which(database_url: str, tmp_path: Path) -> None:
    path = Path(tempfile.mkdtemp(prefix="uds-")) / "receiver.sock"
    path.touch()
    given = {"DATABASE_URL": database_url, **SECRETS}
    with started(tmp_path, "serve", "--uds", str(path), "--control-port", "0", **given) as refused:
        assert refused.ends() != 0
        assert f"cannot listen on {path}" in refused.log or f"{path} is taken" in refused.log
    path.unlink()
    # What a process that was killed leaves behind is no reason not to start.
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    where = ("--host", "127.0.0.1", "--host", "127.0.0.2", "--uds", str(path))
    with serving(tmp_path, database_url, *where) as process:
        shown = re.findall(r"^receiver  (\S+)$", process.output, re.MULTILINE)
        port = urlsplit(shown[0]).port
        assert shown == [f"http://127.0.0.1:{port}", f"http://127.0.0.2:{port}", f"unix:{path}"]
        for url in shown[:2]:
            assert httpx.get(f"{url}/healthz").status_code == 200
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            assert client.get("http://test/healthz").status_code == 200
            assert client.post("http://test/webhooks/github", content=b"{}").status_code == 401
        process.signal()
        assert process.ends() == 0
    assert not path.exists()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_the_address_of_both_families_takes_both_and_is_shown_as_what_it_is(database_url: str, tmp_path: Path) -> None:
    with serving(tmp_path, database_url, "--host", "::") as process:
        [shown] = re.findall(r"^receiver  (\S+)$", process.output, re.MULTILINE)
        port = urlsplit(shown).port
        assert shown == f"http://[::]:{port}"
        for address in ("127.0.0.1", "[::1]"):
            assert httpx.get(f"http://{address}:{port}/healthz").status_code == 200
    with serving(tmp_path, database_url, "--host", "0.0.0.0") as process:  # noqa: S104 - on purpose
        assert re.search(r"^receiver  http://0\.0\.0\.0:\d+$", process.output, re.MULTILINE)


def test_a_process_that_was_asked_to_stop_takes_deliveries_until_a_balancer_has_noticed(
    database_url: str, tmp_path: Path
) -> None:
    with serving(tmp_path, database_url, WEBHOOKS_SHUTDOWN_DELAY_S="60") as process, httpx.Client() as client:
        url = f"{process.receiver}/webhooks/github"
        assert client.post(url, content=b"{}").headers.get("connection") != "close"
        process.signal()
        process.says("not ready any more")
        answer = client.post(url, content=b"{}")
        assert (answer.status_code, answer.headers["connection"]) == (401, "close")
        ready = httpx.get(f"{process.control}/readyz")
        assert ready.status_code == 503
        assert "stopping" in ready.json()["checks"]
        assert process.alive
        process.signal()  # a second one skips the delay
        assert process.ends() == 0
        with pytest.raises(httpx.ConnectError):
            httpx.post(url, content=b"{}")
