"""A busy queue is read from its front once a second; nothing that lies before the mark is missed for longer."""

from __future__ import annotations

from gates import Session, a_gate, opened, sql

from webhooks.gate import Gate
from webhooks.marks import MOST, OFTEN, WINDOW_S, Marks
from webhooks.pool import Pool


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def next_key(pool: Pool, gate: Gate[Session], limit: int = 1) -> list[object]:
    return [claim.key for claim in await gate.take_next(pool, "drafting", limit)]


async def a_busy_queue(pool: Pool, gate: Gate[Session]) -> Clock:
    """Rows 100 to 149 waiting, 20 claimed in the last second, and one from the front in this one."""
    clock = Clock()
    pool.marks = Marks(clock)
    await opened(pool, gate, *range(100, 150))
    for key in range(100, 100 + OFTEN):
        assert await next_key(pool, gate) == [key]
    clock.now += WINDOW_S
    assert await next_key(pool, gate) == [100 + OFTEN]
    return clock


async def put_in_front(pool: Pool, key: int) -> None:
    await sql(pool, "UPDATE patch_sessions SET not_before = now() - interval '1 day' WHERE sc_id = %(key)s", key=key)


async def test_a_busy_queue_is_read_from_where_the_last_look_ended_until_the_second_is_over(pool: Pool) -> None:
    gate = a_gate()
    clock = await a_busy_queue(pool, gate)
    await put_in_front(pool, 149)
    assert await next_key(pool, gate) == [101 + OFTEN]
    clock.now += WINDOW_S
    assert await next_key(pool, gate) == [149]


async def test_a_queue_that_is_looked_through_now_and_then_is_always_read_from_its_front(pool: Pool) -> None:
    gate = a_gate()
    clock = Clock()
    pool.marks = Marks(clock)
    await opened(pool, gate, *range(100, 150))
    for key in (149, 148):
        for _ in range(OFTEN - 2):
            assert await next_key(pool, gate) != [key]
        await put_in_front(pool, key)
        assert await next_key(pool, gate) == [key]
        clock.now += WINDOW_S


async def test_a_look_that_finds_too_little_behind_the_mark_goes_through_the_whole_queue_at_once(pool: Pool) -> None:
    gate = a_gate()
    await a_busy_queue(pool, gate)
    await put_in_front(pool, 149)
    taken = await gate.take_next(pool, "drafting", 100)
    assert [claim.key for claim in taken] == list(range(101 + OFTEN, 149))
    assert taken.more
    await opened(pool, gate, 150)  # behind the mark
    assert await next_key(pool, gate, 2) == [149, 150]
    assert await next_key(pool, gate) == []


async def test_of_another_queue_nothing_is_remembered(pool: Pool) -> None:
    gate = a_gate()
    await a_busy_queue(pool, gate)
    await put_in_front(pool, 149)
    claims = await gate.take_next(pool, "drafting", 1, equal={"title": "story 149"})
    assert [claim.key for claim in claims] == [149]


def test_the_marks_of_queues_that_are_never_asked_for_again_do_not_pile_up() -> None:
    marks = Marks()
    for queue in range(3 * MOST):
        marks.of(queue)
        marks.set(queue, ("1",))
    assert len(marks._queues) <= MOST
