"""The stand-in's drafter: reads a story from standard input, prints a unified diff against the files around it.

What `PATCH_DRAFTER` names is a program like this one. A real one would ask a model.
"""

from __future__ import annotations

import difflib
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def draft(story: dict[str, Any], before: list[str], now: datetime) -> str:
    """A diff that adds a note about the story: its name, what it says, and what was asked and answered."""
    parts = [f"# {story['name']}", story.get("description"), f"Drafted on {now:%Y-%m-%d at %H:%M:%S} UTC."]
    if story.get("answer"):
        parts += [f"Asked: {story.get('question')}", f"Answered: {story['answer']}"]
    note = "\n\n".join("\n".join(part.splitlines()) for part in parts if part)
    after = [*before, *(["\n"] if before else []), *(f"{line}\n" for line in note.split("\n"))]
    path = f"notes/sc-{story['id']}.md"
    old = f"a/{path}" if before else "/dev/null"
    return "".join(difflib.unified_diff(before, after, old, f"b/{path}"))


def main() -> None:
    story = json.load(sys.stdin.buffer)
    note = Path("notes") / f"sc-{story['id']}.md"
    before = note.read_text(encoding="utf-8").splitlines(keepends=True) if note.exists() else []
    sys.stdout.buffer.write(draft(story, before, datetime.now(UTC)).encode())


if __name__ == "__main__":
    main()
