"""Retention: what has ended is removed once it is old enough, in batches that nobody has to wait for.

Bodies, headers, keys (a delivery's row itself), effects and attempts each have an age of their own. What is unfinished
or waits for a person is never touched, and a key stays as long as its provider may send the delivery again.
"""

from webhooks.retention.ages import KINDS, Ages, Before, Kind
from webhooks.retention.run import Report, Transact, as_json, prune, scheduled
from webhooks.retention.step import Line

__all__ = ["KINDS", "Ages", "Before", "Kind", "Line", "Report", "Transact", "as_json", "prune", "scheduled"]
