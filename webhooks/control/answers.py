"""What the JSON API answers, as models: the description of the API is made of them, and tests hold answers to it."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from webhooks.deliveries import Disposition
from webhooks.replay import Result
from webhooks.reverify import Outcome


class Answer(BaseModel):
    """An answer has what its model says, and nothing else."""

    model_config = ConfigDict(extra="forbid")


class Error(Answer):
    """What is wrong, for a person."""

    error: str
    reason: str | None = None


class Phase(Answer):
    """One phase as its table has it now."""

    table: str
    phase: str | None
    ready: str | None
    backlog: int
    parked: int
    wanting: int
    oldest_s: float | None
    in_progress: int
    escalated: int


class Process(Answer):
    """A process that lives, and what is at fault in it, by name."""

    id: str
    app: str
    started_at: datetime
    seen_at: datetime
    degraded: dict[str, str]


class Status(Answer):
    """Every phase, the inbox first, and every process."""

    phases: list[Phase]
    processes: list[Process]


class DeliveryLine(Answer):
    """A delivery in a list."""

    id: int
    source: str
    event: str | None
    received_at: datetime
    attempt_count: int
    max_attempts: int
    not_before: datetime
    parked_on: str | None
    parent: int | None
    position: int
    disposition: Disposition
    reason: str | None


class Deliveries(Answer):
    """Deliveries, the newest first; `notes` says of a filter that nothing has such an event."""

    deliveries: list[DeliveryLine]
    notes: list[str]


class InboxAttempt(Answer):
    """One try at applying a delivery."""

    attempt: int
    claimed_by: str | None
    claimed_at: datetime
    ended_at: datetime | None
    outcome: str | None
    error: str | None


class Delivery(DeliveryLine):
    """A delivery with everything that is kept of it. Its body is text where it is UTF-8, else `body_base64`."""

    dedup_key: str
    origin: str
    replay_of: int | None
    claimed_by: str | None
    claimed_at: datetime | None
    lease_until: datetime | None
    parked_since: datetime | None
    last_error: str | None
    pruned_at: datetime | None
    headers_pruned_at: datetime | None
    headers: list[tuple[str, str]]
    body: str | None = None
    body_base64: str | None = None
    attempts: list[InboxAttempt]
    events: list[int]


class RowAttempt(InboxAttempt):
    """One attempt at a phase of a row."""

    key: str
    visit: int
    claim_seq: int
    phase: str


class Effect(Answer):
    """One call to the outside world."""

    name: str
    claim_seq: int
    idempotency_key: str
    state: Literal["intended", "done", "failed"]
    result: str | None
    error: str | None
    calls: int
    told_by: str | None
    intended_at: datetime
    ended_at: datetime | None


class Escalated(Answer):
    """A row that a person has to decide about."""

    row: str
    phase: str | None
    since: datetime | None
    attempt_count: int
    max_attempts: int
    last_error: str | None
    attempts: list[RowAttempt]
    effects: list[Effect]
    cannot: str | None
    refusal: str | None
    constraint: str | None


class Escalations(Answer):
    """The rows that a person has to decide about."""

    escalations: list[Escalated]


class Claimable(Answer):
    """What would become of a claim made now."""

    claimable: bool
    reason: str
    told: str
    do: str | None


class Moment(Answer):
    """One line of a timeline."""

    at: datetime
    what: str
    told: str
    claim_seq: int | None


class Why(Answer):
    """What happened to a row, and whether it could be claimed now."""

    row: str
    now: datetime
    columns: dict[str, JsonValue] | None
    claim: Claimable
    timeline: list[Moment]
    cut: bool


class Decided(Answer):
    """The row, and its status after the decision."""

    row: str
    status: str


class RejectionLine(Answer):
    """A refused request in a list."""

    id: int
    source: str
    cause: str
    body_bytes: int
    received_at: datetime
    last_at: datetime
    times: int
    delivery: int | None
    accepted_at: datetime | None


class Rejections(Answer):
    """Refused requests, the newest first."""

    rejections: list[RejectionLine]


class Rejection(RejectionLine):
    """A refused request with what was kept of it, and what can be said about why. Its body is text or `body_base64`."""

    headers: list[tuple[str, str]]
    body: str | None = None
    body_base64: str | None = None
    body_sha256: str | None
    hints: list[str]


class RejectionKind(Answer):
    """What was refused of one source for one cause, with hints worked out from an example."""

    source: str
    cause: str
    kept: int
    times: int
    accepted: int
    last_at: datetime
    example: int
    hints: list[str]


class RejectionKinds(Answer):
    """What was refused, by source and cause."""

    kinds: list[RejectionKind]


class Verdict(Answer):
    """What became, or would become, of one."""

    id: int
    source: str
    cause: str
    outcome: Outcome
    delivery: int | None
    told: str


class Reverified(Answer):
    """What became of requests that were verified again; `dry`: nothing was done."""

    dry: bool
    rejections: list[Verdict]


class PlanGroup(Answer):
    """Deliveries alike that a replay would be about."""

    source: str
    event: str | None
    disposition: Disposition
    pruned: bool
    count: int


class PlanExample(Answer):
    """One of them."""

    id: int
    source: str
    event: str | None
    disposition: Disposition
    received_at: datetime


class PlanBody(Answer):
    """What a replay would be about, counted, and the first few."""

    total: int
    unreadable: int
    left_out: int
    groups: list[PlanGroup]
    sample: list[PlanExample]


class Plan(Answer):
    """What would be done: nothing was done. `notes` says of a filter that nothing has such an event, or row."""

    plan: PlanBody
    notes: list[str]


class ReplayReport(Answer):
    """What a replay did so far."""

    total: int
    counts: dict[Result, int]
    causes: dict[str, int]
    signed: int
    after: int
    upto: int | None
    stopped: str | None


class Replay(Answer):
    """A replay of this process: it runs while `ended_at` is null."""

    id: int
    how: Literal["same", "new"] = Field(alias="as")
    by: str
    reason: str
    started_at: datetime
    ended_at: datetime | None
    report: ReplayReport
    error: str | None


class Replays(Answer):
    """The replays that this process was asked for, the newest first."""

    replays: list[Replay]
