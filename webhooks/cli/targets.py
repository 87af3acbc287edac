"""Where hooks are registered, as a command's argument, and what one sends, for a person."""

from __future__ import annotations

from typing import Any

import click

from webhooks.hooks import Hook, Target, parsed
from webhooks.hooks.target import EVERYTHING


class TargetType(click.ParamType[Target]):
    """`github:OWNER/REPO[,events=…]` or `shortcut`."""

    name = "target"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Target:
        if isinstance(value, Target):
            return value
        try:
            return parsed(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class PlaceType(TargetType):
    """`github:OWNER/REPO` or `shortcut`: a target whose events do not matter."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Target:
        found = super().convert(value, param, ctx)
        if found.events:
            self.fail(f"{value!r}: name {found}; events= goes with create", param, ctx)
        return found


TARGET = TargetType()
PLACE = PlaceType()


def events_of(hook: Hook) -> str:
    """Return what a hook sends, for a person."""
    return "every event" if hook.events == EVERYTHING else ", ".join(hook.events)
