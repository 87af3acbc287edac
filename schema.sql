-- The tables of the webhook consumer, as numbered sections. `webhooks migrate` applies the sections that a database
-- lacks, in one transaction; a section is never edited once released, changes are appended as new ones.
--
-- gated        The columns every gated table has (`LIKE gated INCLUDING ALL`); it holds no rows itself.
--              A row waits in a *ready* status, is moved to a *claimed* status by one conditional UPDATE, and leaves it
--              by a second one that names the claim. While it is claimed, `claimed_from` is the ready status to go back
--              to and `lease_until` is when somebody else may take it. `claim_seq` is the clever column: a number no two
--              claims ever share, in the WHERE of every later write (the fence). It stays after the claim has ended,
--              as the number of the row's last claim, and so finds its line in `attempts`. `visit` changes whenever the
--              row enters a ready status from outside, and makes idempotency keys new; a retry keeps it.
-- attempts     One line a claim, written in the claim's own transaction and closed by whoever ended it.
-- effects      One line a call to the outside world, by its idempotency key: `intended` before the call, then `done`
--              with its result, or `failed` when the call certainly did not happen.
-- decisions    What a person decided about a row, who, and why.
-- deliveries   The inbox: one line a request whose signature was right, with its exact bytes, and one a further event
--              of the same request (`parent`, `position` from 1; the body is read from the parent). It is a gated table:
--              received → applying → processed | ignored, and `dead` when attempts ran out. `parked_on` names the row
--              it waits for. `accepted_xid` orders by visibility, which `id` does not.
-- patch_sessions  The patch flow of `handlers/patch_sessions.py`: one line a story.
--
-- No line names a schema (`search_path` decides), and no column that a renewal writes is indexed.

-- section 1: gate and inbox

-- One nextval() hands a process a block of a hundred numbers.
CREATE SEQUENCE claim_seq INCREMENT BY 100;

CREATE TABLE gated (
    status        text        NOT NULL,
    claimed_from  text,
    visit         bigint      NOT NULL DEFAULT nextval('claim_seq'),
    attempt_count integer     NOT NULL DEFAULT 0,
    max_attempts  integer     NOT NULL DEFAULT 5,
    not_before    timestamptz NOT NULL DEFAULT now(),
    claim_seq     bigint,
    claimed_by    text,
    claimed_at    timestamptz,
    lease_until   timestamptz,
    last_error    text,
    CONSTRAINT gated_attempts CHECK (attempt_count >= 0 AND max_attempts >= 0),
    -- A lease belongs to a claim: who goes back where must be known. The bare UPDATE run by hand has none of the three.
    CONSTRAINT gated_lease CHECK (lease_until IS NULL OR claimed_from IS NOT NULL)
);
ALTER TABLE gated REPLICA IDENTITY FULL;

CREATE TABLE attempts (
    claim_seq  bigint      PRIMARY KEY DEFAULT nextval('claim_seq'),
    table_name text        NOT NULL,
    key        text        NOT NULL,
    phase      text        NOT NULL,
    visit      bigint      NOT NULL,
    attempt    integer     NOT NULL,
    claimed_by text,
    claimed_at timestamptz NOT NULL DEFAULT statement_timestamp(),
    ended_at   timestamptz,
    outcome    text,
    error      text,
    CONSTRAINT attempts_outcome CHECK (
        outcome IN ('done', 'error', 'expired', 'interrupted', 'snoozed', 'escalated', 'lost')),
    CONSTRAINT attempts_ended CHECK ((ended_at IS NULL) = (outcome IS NULL))
);
CREATE INDEX attempts_row ON attempts (table_name, key, claimed_at);

CREATE TABLE effects (
    idempotency_key text        PRIMARY KEY,
    claim_seq       bigint      NOT NULL,
    state           text        NOT NULL,
    input_hash      text        NOT NULL,
    result          text,
    call_until      timestamptz NOT NULL,
    intended_at     timestamptz NOT NULL DEFAULT statement_timestamp(),
    ended_at        timestamptz,
    error           text,
    CONSTRAINT effects_state CHECK (state IN ('intended', 'done', 'failed')),
    CONSTRAINT effects_result CHECK ((state = 'done') = (result IS NOT NULL))
);

CREATE TABLE decisions (
    id         bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    table_name text        NOT NULL,
    key        text        NOT NULL,
    decision   text        NOT NULL,
    decided_by text        NOT NULL,
    reason     text        NOT NULL,
    decided_at timestamptz NOT NULL DEFAULT statement_timestamp()
);
CREATE INDEX decisions_row ON decisions (table_name, key, decided_at);

CREATE TABLE deliveries (
    id           bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    source       text        NOT NULL,
    dedup_key    text        NOT NULL,
    position     integer     NOT NULL DEFAULT 0,
    parent       bigint,
    replay_of    bigint,
    origin       text        NOT NULL DEFAULT 'received',
    headers      jsonb       NOT NULL DEFAULT '[]',
    body         bytea,
    received_at  timestamptz NOT NULL DEFAULT statement_timestamp(),
    accepted_xid xid8        NOT NULL DEFAULT pg_current_xact_id(),
    event        text,
    reason       text,
    parked_on    text,
    parked_since timestamptz,
    LIKE gated INCLUDING ALL,
    CONSTRAINT deliveries_once UNIQUE (source, dedup_key, position),
    CONSTRAINT deliveries_body CHECK ((body IS NULL) = (parent IS NOT NULL)),
    CONSTRAINT deliveries_position CHECK ((position = 0) = (parent IS NULL)),
    CONSTRAINT deliveries_status CHECK (status IN ('received', 'applying', 'processed', 'ignored', 'dead')),
    CONSTRAINT deliveries_parked CHECK ((parked_on IS NULL) = (parked_since IS NULL))
) WITH (fillfactor = 80);
-- Bodies are read whole and often compressed already: stored as they are, out of line.
ALTER TABLE deliveries ALTER COLUMN body SET STORAGE EXTERNAL;
CREATE INDEX deliveries_received ON deliveries (not_before, id) WHERE status = 'received';
CREATE INDEX deliveries_applying ON deliveries (id) WHERE status = 'applying';
CREATE INDEX deliveries_dead ON deliveries (id) WHERE status = 'dead';
CREATE INDEX deliveries_parked_on ON deliveries (parked_on) WHERE parked_on IS NOT NULL;
CREATE INDEX deliveries_parent ON deliveries (parent) WHERE parent IS NOT NULL;

-- section 2: patch sessions

CREATE TABLE patch_sessions (
    sc_id               bigint      PRIMARY KEY,
    title               text        NOT NULL,
    story_url           text,
    question            text,
    question_comment_id bigint,
    asked_at            timestamptz,
    answer              text,
    answered_by         text,
    patch               text,
    base_commit         text,
    pull_request_number bigint,
    pull_request_url    text,
    merged_at           timestamptz,
    note                text,
    opened_at           timestamptz NOT NULL DEFAULT now(),
    LIKE gated INCLUDING ALL,
    CONSTRAINT patch_sessions_status CHECK (status IN (
        'received', 'clarifying', 'asked', 'clarified', 'drafting', 'drafted', 'opening', 'in_review',
        'merged', 'finishing', 'finished', 'closed', 'escalated'))
) WITH (fillfactor = 80);
CREATE INDEX patch_sessions_received ON patch_sessions (not_before, sc_id) WHERE status = 'received';
CREATE INDEX patch_sessions_clarified ON patch_sessions (not_before, sc_id) WHERE status = 'clarified';
CREATE INDEX patch_sessions_drafted ON patch_sessions (not_before, sc_id) WHERE status = 'drafted';
CREATE INDEX patch_sessions_merged ON patch_sessions (not_before, sc_id) WHERE status = 'merged';
CREATE INDEX patch_sessions_claimed ON patch_sessions (sc_id)
    WHERE status IN ('clarifying', 'drafting', 'opening', 'finishing');
CREATE INDEX patch_sessions_escalated ON patch_sessions (sc_id) WHERE status = 'escalated';
