"""What a handler or a phase writes is held against the table on start, and what it is against how it is called."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from consumers import arrival, arrived, quick, stories
from gates import attempts_of, opened, outcomes_of, row_of, sql, until
from pydantic import BaseModel

from webhooks import Claim, Consumer, Done, Event, Gate, Pool, Shortcut, Transaction
from webhooks.errors import ConfigurationError
from webhooks.serve.database import Database, prepared
from webhooks.worker import Worker

sessions = Gate("patch_sessions", key="sc_id")
sessions.phase("received", claimed="clarifying", done=("clarified", "asked"))


def gate_with(work: Callable[[Any, Claim[Any]], Any], done: Any = "drafted") -> Gate[dict[str, Any]]:
    gate = Gate("patch_sessions", key="sc_id")
    gate.phase("clarified", claimed="drafting", done=done, max_attempts=3)(work)
    return gate


async def faults_of(pool: Pool, consumer: Consumer) -> list[str]:
    async with pool.transaction() as tx:
        return await consumer.check(tx)


async def handled(pool: Pool, handle: Callable[[Event, Transaction], Any]) -> list[str]:
    """What is wrong with a handler."""
    shortcut = Shortcut()
    shortcut.on("story.update")(handle)
    return await faults_of(pool, Consumer(gates=[sessions], sources=[shortcut]))


# On start


async def misspelt(row: Any, claim: Claim[Any]) -> Done:
    return claim.done(patsh="x", patch="y")


async def completed(row: Any, claim: Claim[Any]) -> Done:
    return await claim.complete(patsh="x")


async def in_a_transaction(row: Any, claim: Claim[Any]) -> Done:
    async with claim.transaction() as tx:
        return await tx.done("drafted", patsh="x")


@pytest.mark.parametrize("work", [misspelt, completed, in_a_transaction])
async def test_a_column_that_a_phase_writes_and_the_table_lacks_is_found_on_start(pool: Pool, work: Any) -> None:
    [fault] = await faults_of(pool, Consumer(gates=[gate_with(work)], sources=[]))
    assert fault.startswith("patch_sessions has no column patsh, which ")
    assert work.__name__ in fault


async def test_what_a_phase_opens_wrongly_is_found_on_start(pool: Pool) -> None:
    gate = Gate("patch_sessions", key="sc_id")

    @gate.phase("clarified", claimed="drafting", done="drafted")
    async def work(row: Any, claim: Claim[Any]) -> Done:
        async with claim.transaction() as tx:
            await gate.open(tx, sc_id=2, title="x", patsh="y")
            return await tx.done()

    [fault] = await faults_of(pool, Consumer(gates=[gate], sources=[]))
    assert fault.startswith("patch_sessions has no column patsh, which gate.open() in ")


async def test_a_column_that_row_names_and_the_table_lacks_is_found_on_start(pool: Pool) -> None:
    class Row(BaseModel):
        sc_id: int
        tittle: str

    async with pool.transaction() as tx:
        [fault] = await Gate("patch_sessions", key="sc_id", row=Row).check(tx)
    assert fault == "patch_sessions has no column tittle, which its gate's row= names"


async def without_its_key(event: Event, tx: Transaction) -> None:
    await sessions.open(tx, title="x")


async def without_what_it_needs(event: Event, tx: Transaction) -> None:
    await sessions.open(tx, sc_id=event.data["story_id"], to="asked")


async def moves_misspelt(event: Event, tx: Transaction) -> None:
    await sessions.advance(tx, 1, "asked", "clarified", anser="x")


@pytest.mark.parametrize(
    ("handle", "said"),
    [
        (without_its_key, "does not give sc_id, which patch_sessions needs"),
        (without_what_it_needs, "does not give title, which patch_sessions needs"),
        (moves_misspelt, "patch_sessions has no column anser, which sessions.advance() in"),
    ],
)
async def test_what_a_handler_writes_wrongly_is_found_on_start(pool: Pool, handle: Any, said: str) -> None:
    [fault] = await handled(pool, handle)
    assert said in fault
    assert handle.__name__ in fault


async def test_a_process_does_not_start_with_what_cannot_be_written(pool: Pool, database_url: str) -> None:
    shortcut = Shortcut()
    shortcut.on("story.update")(without_its_key)
    consumer = Consumer(gates=[sessions], sources=[shortcut])
    with pytest.raises(ConfigurationError, match="does not give sc_id"):
        await prepared(Database(database_url, None), quick(), consumer)


async def test_what_cannot_be_known_from_the_source_is_no_fault(pool: Pool) -> None:
    columns = {"sc_id": 1, "title": "x"}

    async def handle(event: Event, tx: Transaction) -> None:
        await sessions.open(tx, **columns)
        await tx.open(nothing=1)  # type: ignore[attr-defined]

    assert await handled(pool, handle) == []

    async def work(row: Any, claim: Claim[Any]) -> Done:
        claim = other_claim()
        return claim.done("anything", nothing="x")  # type: ignore[no-any-return]

    gate = gate_with(work)
    gate.phase("asked", claimed="answering", done="answered")(namespace()["work"])
    async with pool.transaction() as tx:
        assert not [fault for fault in await gate.check(tx) if "nothing" in fault]


def other_claim() -> Any:
    raise NotImplementedError


def namespace() -> dict[str, Any]:
    """A function whose source is nowhere."""
    names: dict[str, Any] = {}
    exec("async def work(row, claim):\n    return claim.done(nothing='x')", names)  # noqa: S102
    return names


async def test_a_key_that_the_database_makes_need_not_be_given(pool: Pool) -> None:
    for statement in (
        "CREATE TABLE jobs (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, code text NOT NULL,"
        " LIKE gated INCLUDING ALL)",
        "CREATE INDEX ON jobs (not_before, id) WHERE status = 'open'",
        "CREATE INDEX ON jobs (id) WHERE status = 'doing'",
    ):
        await sql(pool, statement.encode())
    jobs = Gate("jobs", key="id")
    jobs.phase("open", claimed="doing", done="done")
    shortcut = Shortcut()

    @shortcut.on("story.update")
    async def handle(event: Event, tx: Transaction) -> None:
        await jobs.open(tx)

    consumer = Consumer(gates=[jobs], sources=[shortcut])
    [fault] = await faults_of(pool, consumer)
    assert "does not give code" in fault
    await sql(pool, b"CREATE FUNCTION fill() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.code = 1; RETURN NEW; END'")
    await sql(pool, b"CREATE TRIGGER fills BEFORE INSERT ON jobs FOR EACH ROW EXECUTE FUNCTION fill()")
    assert await faults_of(pool, consumer) == []


# Where they are declared


async def wrong_status(row: Any, claim: Claim[Any]) -> Done:
    return claim.done("finished")


async def no_status(row: Any, claim: Claim[Any]) -> Done:
    return claim.done(patch="x")


def test_a_phase_that_ends_in_none_of_its_statuses_is_refused_where_it_is_declared() -> None:
    with pytest.raises(ConfigurationError, match=r"claim\.done\(\) in .*wrong_status: .*ends in one of drafted"):
        gate_with(wrong_status)
    with pytest.raises(ConfigurationError, match="ends in one of drafted, asked: name one"):
        gate_with(no_status, ("drafted", "asked"))


def plain(row: Any, claim: Any) -> None: ...


async def generates(row: Any, claim: Any) -> Any:
    yield 1


async def takes_one(row: Any) -> None: ...


class Callable_:
    def __call__(self, row: Any, claim: Any) -> None: ...


class Awaitable_:
    async def __call__(self, row: Any, claim: Any) -> Done:
        return Done()


@functools.wraps(no_status)
def wrapping(*args: Any) -> Any:
    return no_status(*args)


WRONG = [plain, generates, takes_one, Callable_(), lambda row, claim: None, functools.partial(plain, 1)]
RIGHT = [no_status, Awaitable_(), Awaitable_().__call__, wrapping, functools.partial(no_status)]


@pytest.mark.parametrize("function", WRONG)
def test_a_function_that_cannot_be_awaited_or_called_is_refused_where_it_is_declared(function: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"phase drafting: .*(cannot be awaited: declare it|is called with 2)"):
        gate_with(function)
    shortcut = Shortcut()
    with pytest.raises(ConfigurationError, match=r"the handler of .story\.update.: "):
        shortcut.on("story.update")(function)
    assert shortcut.handlers == {}


@pytest.mark.parametrize("function", RIGHT)
def test_what_can_be_awaited_is_taken_in_any_form(function: Any) -> None:
    assert gate_with(function).phases["drafting"].function is function


# At the first attempt


async def ran(pool: Pool, work: Callable[[Any, Claim[Any]], Awaitable[Any]]) -> dict[str, Any]:
    """Row 1 once a worker has run it once."""
    gate = gate_with(cast("Any", work))
    await opened(pool, gate, 1)
    worker = Worker(pool, Consumer(gates=[gate], sources=[]))
    worker.start()
    try:

        async def ended() -> bool:
            return any(attempt["ended_at"] for attempt in await attempts_of(pool, 1))

        await until(ended)
    finally:
        await worker.stop()
    return await row_of(pool, 1)


async def returns_nothing(row: Any, claim: Claim[Any]) -> Any:
    return None


async def returns_a_status(row: Any, claim: Claim[Any]) -> Any:
    return "drafted"


@pytest.mark.parametrize(("work", "said"), [(returns_nothing, "nothing"), (returns_a_status, "a str")])
async def test_a_phase_that_does_not_say_how_it_ended_has_failed(pool: Pool, work: Any, said: str) -> None:
    row = await ran(pool, work)
    assert (row["status"], row["attempt_count"]) == ("clarified", 1)
    assert row["last_error"].startswith(f"TypeError: the phase drafting returned {said}, so nobody knows how it ended")
    assert work.__name__ in row["last_error"]
    assert await outcomes_of(pool, 1) == ["error"]


async def has_completed(row: Any, claim: Claim[Any]) -> Any:
    await claim.complete(patch="x")


async def has_ended_in_a_transaction(row: Any, claim: Claim[Any]) -> Any:
    async with claim.transaction() as tx:
        await tx.done(patch="x")


async def returns_what_complete_returns(row: Any, claim: Claim[Any]) -> Done:
    return await claim.complete(patch="x")


@pytest.mark.parametrize("work", [has_completed, has_ended_in_a_transaction, returns_what_complete_returns])
async def test_a_phase_that_has_ended_its_claim_may_return_nothing(pool: Pool, work: Any) -> None:
    row = await ran(pool, work)
    assert (row["status"], row["patch"]) == ("drafted", "x")


async def lacks_a_column(row: Any, claim: Claim[Any]) -> Done:
    return claim.done(patsh="x")


async def lacks_it_in_a_transaction(row: Any, claim: Claim[Any]) -> Any:
    async with claim.transaction() as tx:
        await tx.done(patsh="x")


async def calls_what_is_not_annotated(row: Any, claim: Claim[Any]) -> Any:
    async def post():  # type: ignore[no-untyped-def]
        raise AssertionError("it must not be called")

    await claim.once("post", post)


async def calls_what_cannot_be_awaited(row: Any, claim: Claim[Any]) -> Any:
    def post() -> int:
        raise AssertionError("it must not be called")

    await claim.once("post", cast("Any", post))


async def calls_with_too_much(row: Any, claim: Claim[Any]) -> Any:
    async def post() -> int:
        raise AssertionError("it must not be called")

    await claim.once("post", cast("Any", post), 1)


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (lacks_a_column, 'done() of patch_sessions: column "patsh" of relation "patch_sessions" does not exist'),
        (lacks_it_in_a_transaction, 'done() of patch_sessions: column "patsh" of relation'),
        (calls_what_is_not_annotated, "post has to say what that is: `async def …(…) -> int:`, or `-> None:`"),
        (calls_what_cannot_be_awaited, "post cannot be awaited: declare it with `async def`"),
        (calls_with_too_much, "post is called with 1 arguments: too many positional arguments"),
    ],
)
async def test_what_trying_again_cannot_mend_asks_a_person_at_once(pool: Pool, work: Any, said: str) -> None:
    row = await ran(pool, work)
    assert (row["status"], row["attempt_count"]) == ("escalated", 1)
    assert said in row["last_error"]
    assert "\n" not in row["last_error"]
    assert await sql(pool, "SELECT * FROM effects") == []


async def test_an_open_without_its_key_ends_its_delivery_at_once(pool: Pool) -> None:
    shortcut = Shortcut()

    @shortcut.on("story.update")
    async def handle(event: Event, tx: Transaction) -> None:
        await sessions.open(tx, title="x")

    [id_] = await arrived(pool, arrival(stories(7)))
    worker = Worker(pool, Consumer(gates=[sessions], sources=[shortcut]))
    worker.start()
    try:

        async def dead() -> bool:
            [row] = await sql(pool, "SELECT status FROM deliveries WHERE id = %(id)s", id=id_)
            return bool(row["status"] == "dead")

        await until(dead)
    finally:
        await worker.stop()
    [row] = await sql(pool, "SELECT attempt_count, last_error FROM deliveries")
    assert row["attempt_count"] == 1
    assert row["last_error"] == "open() of patch_sessions was not given sc_id, which every row needs"
