"""Which deliveries a replay or an export is about.

They are read in the order of their ids, some hundreds at a time, each time from the last id on, in transactions that
end at once: no snapshot stays open and memory stays flat, however many there are. What arrives meanwhile is left out.
"""

from webhooks.selection.choice import Scope, Selection, Unit, chosen
from webhooks.selection.names import Names, unknown
from webhooks.selection.paths import JsonFilter
from webhooks.selection.reader import Found, Group, Reader, counted, first

__all__ = [
    "Found",
    "Group",
    "JsonFilter",
    "Names",
    "Reader",
    "Scope",
    "Selection",
    "Unit",
    "chosen",
    "counted",
    "first",
    "unknown",
]
