"""Running deliveries again: out of the inbox, or out of files, into the inbox or to a receiver elsewhere.

Each function takes frozen values and a pool, tells its progress to a callback, and returns a report; nothing here knows
of a terminal or of HTTP.
"""

from webhooks.replay.arriving import Arrival, Desk, arrivals
from webhooks.replay.exporting import Export, export
from webhooks.replay.importing import imported
from webhooks.replay.plan import Plan, planned
from webhooks.replay.redaction import Redaction
from webhooks.replay.report import INTERRUPTED, Limits, Progress, Report, Result
from webhooks.replay.rerunning import Again, again
from webhooks.replay.sending import sent, stored
from webhooks.replay.weighing import Weighed, weighed

__all__ = [
    "INTERRUPTED",
    "Again",
    "Arrival",
    "Desk",
    "Export",
    "Limits",
    "Plan",
    "Progress",
    "Redaction",
    "Report",
    "Result",
    "Weighed",
    "again",
    "arrivals",
    "export",
    "imported",
    "planned",
    "sent",
    "stored",
    "weighed",
]
