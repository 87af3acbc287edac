"""The registry: what fits together and what does not."""

from __future__ import annotations

import pytest

from webhooks import Consumer, Event, Gate, GitHub, Shortcut, Transaction
from webhooks.errors import ConfigurationError


def test_gates_are_known_by_their_table_and_sources_by_their_name() -> None:
    sessions, mirror = Gate("patch_sessions", key="sc_id"), GitHub("mirror")
    consumer = Consumer(gates=[sessions], sources=[Shortcut(), mirror])
    assert consumer.gates == {"patch_sessions": sessions}
    assert list(consumer.sources) == ["shortcut", "mirror"]
    assert consumer.sources["mirror"] is mirror


def test_a_handler_is_found_by_its_source_and_event_and_by_nothing_else() -> None:
    shortcut = Shortcut()

    @shortcut.on("story.update")
    async def handle(event: Event, tx: Transaction) -> None: ...

    consumer = Consumer(gates=[], sources=[shortcut, GitHub()])
    found = consumer.handler("shortcut", "story.update")
    assert found is not None
    assert found.function is handle
    assert consumer.handler("shortcut", "Story.Update") is None
    assert consumer.handler("github", "story.update") is None
    assert consumer.handler("nobody", "story.update") is None


def test_two_gates_over_one_table_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="one gate"):
        Consumer(gates=[Gate("issues", key="id"), Gate("issues", key="id")], sources=[])


def test_two_sources_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="URL"):
        Consumer(gates=[], sources=[GitHub(), GitHub()])


def test_a_gate_over_the_inbox_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="deliveries"):
        Consumer(gates=[Gate("deliveries", key="id")], sources=[])
