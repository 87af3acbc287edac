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
-- decisions    What a person decided about a row, who, and why; and `value`, what its phase is told of it in this `visit`.
-- notifications  One line an escalation that somebody is to be told of; a gated table of the library's own.
-- stuck        One line a row that refuses to be claimed, or to be freed when its claim is over: which constraint or
--              trigger forbids it. A line that no process has renewed for minutes is outdated, and is removed.
-- deliveries   The inbox: one line a request whose signature was right, with its exact bytes, and one a further event
--              of the same request (`parent`, `position` from 1, and its `part` of the parent's body). It is a gated table:
--              received → applying → processed | ignored, and `dead` when attempts ran out. `parked_on` names the row
--              it waits for; `wants` says which handler a process needs to claim it. `accepted_xid` orders by visibility,
--              which `id` does not.
-- patch_sessions  The patch flow of `handlers/patch_sessions.py`: one line a story.
-- companies    Who has issues and agents. One that GitHub tells of is a repository: `repository_id` is its number, by
--              which it is known whatever it is called, and `repository` its name now. `id` is what it was called when it
--              was first heard of, and never changes.
-- agents       Who resolves a company's issues. `adapter` says how it is called: JSON that `handlers/agents.py` reads.
-- issues       The work of agents: open → claimed → resolved, and `escalated` when attempts ran out. `rank_at` is the
--              clever column: what is claimed first, the creation time less the priority's head start, so that urgent
--              issues come first and none waits for ever. `external_ref` names the issue elsewhere (`github#7`), and
--              `told_at` is the time, by that side's clock, of the newest word about it.
-- github_issues  What GitHub has said of each issue: the newest word about who is to work on it and at what, and when it
--              was closed, opened again or gone. `issues` follows it.
-- rejections   Requests that were refused: the named cause, and what is needed to find out why and to accept them later.
--              `proved` ones, which a secret of ours signed, have room that no flood can take.
--              Nothing of them is in `deliveries`.
-- redeliveries  What a provider was asked to deliver again, by its delivery log's scope and the delivery's guid.
-- reconcile_turns  One line a thing that is reconciled on a schedule: whose turn it was, when the next one is.
-- heartbeat_runs  One line a run in which agents worked their queues; its claims are `attempts.claimed_by = run:<id>`,
--              which the view `heartbeat_run_items` reads. Nothing infers from it who is alive: leases say that.
-- processes    One line a process: when it was last seen, what it handles, what is at fault in it. Stays a day.
-- flow_declarations  What was ever declared about a ready status, and when first: which of two rival flows is in force.
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

-- section 3: companies, agents, issues

CREATE TABLE companies (
    id         text        PRIMARY KEY,
    name       text        NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT companies_id CHECK (id <> '')
);

CREATE TABLE agents (
    company_id text        NOT NULL REFERENCES companies (id),
    id         text        NOT NULL,
    name       text        NOT NULL,
    adapter    jsonb       NOT NULL,
    paused     boolean     NOT NULL DEFAULT false,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (company_id, id),
    CONSTRAINT agents_id CHECK (id <> '')
);

-- No foreign keys: an issue may be told of before its agent is known, and inserts must not lock the company's row.
CREATE TABLE issues (
    id                bigint      GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    company_id        text        NOT NULL,
    assigned_agent_id text,
    title             text        NOT NULL,
    body              text        NOT NULL DEFAULT '',
    priority          text        NOT NULL DEFAULT 'medium',
    created_at        timestamptz NOT NULL DEFAULT now(),
    result            text,
    external_ref      text,
    told_at           timestamptz,
    -- Arithmetic on timestamptz depends on the session's time zone and may not be generated; in UTC it does not.
    rank_at           timestamptz GENERATED ALWAYS AS ((
        created_at AT TIME ZONE 'UTC' - CASE priority
            WHEN 'critical' THEN interval '30 days'
            WHEN 'high'     THEN interval '14 days'
            WHEN 'medium'   THEN interval '7 days'
            ELSE                 interval '0 days'
        END) AT TIME ZONE 'UTC') STORED,
    LIKE gated INCLUDING ALL,
    CONSTRAINT issues_reference UNIQUE (company_id, external_ref),
    CONSTRAINT issues_priority CHECK (priority IN ('critical', 'high', 'medium', 'low')),
    CONSTRAINT issues_status CHECK (status IN ('open', 'claimed', 'resolved', 'escalated'))
) WITH (fillfactor = 80);
ALTER TABLE issues ALTER COLUMN status SET DEFAULT 'open';
-- One queue an agent, in the order of the claim. `not_before` is in it so that rows which rest after a failure are
-- passed over in the index, without a look at each of them.
CREATE INDEX issues_open ON issues (company_id, assigned_agent_id, rank_at, id, not_before) WHERE status = 'open';
-- Nearly always empty; without it every sweep would read all open issues.
CREATE INDEX issues_exhausted ON issues (id) WHERE status = 'open' AND attempt_count >= max_attempts;
CREATE INDEX issues_claimed ON issues (id) WHERE status = 'claimed';
CREATE INDEX issues_escalated ON issues (id) WHERE status = 'escalated';

CREATE TABLE heartbeat_runs (
    id          bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    company_id  text        NOT NULL REFERENCES companies (id),
    agent_id    text,
    claim_limit integer,
    started_at  timestamptz NOT NULL DEFAULT statement_timestamp(),
    ended_at    timestamptz,
    claimed     integer     NOT NULL DEFAULT 0,
    resolved    integer     NOT NULL DEFAULT 0,
    failed      integer     NOT NULL DEFAULT 0,
    escalated   integer     NOT NULL DEFAULT 0,
    note        text,
    CONSTRAINT heartbeat_runs_limit CHECK (claim_limit > 0),
    CONSTRAINT heartbeat_runs_counts CHECK (claimed = resolved + failed + escalated AND resolved >= 0 AND failed >= 0
        AND escalated >= 0)
);
CREATE INDEX heartbeat_runs_company ON heartbeat_runs (company_id, started_at);

-- CASE, because a condition that somebody adds may be tried before the view's own, on lines that hold no such number.
CREATE VIEW heartbeat_run_items AS
SELECT CASE WHEN claimed_by ~ '^run:[0-9]{1,18}$' THEN substr(claimed_by, 5)::bigint END AS run_id,
    CASE WHEN table_name = 'issues' THEN key::bigint END AS issue_id,
    claim_seq, attempt, claimed_at, ended_at, outcome, error
FROM attempts
WHERE table_name = 'issues' AND claimed_by ~ '^run:[0-9]{1,18}$';
CREATE INDEX attempts_run ON attempts
    ((CASE WHEN claimed_by ~ '^run:[0-9]{1,18}$' THEN substr(claimed_by, 5)::bigint END))
    WHERE table_name = 'issues' AND claimed_by ~ '^run:[0-9]{1,18}$';

-- section 4: proof and notifications

-- What a delivery's event moved, as `table:key`: so that a row's history names what moved it.
ALTER TABLE deliveries ADD COLUMN moved_rows text[];
CREATE INDEX deliveries_moved_rows ON deliveries USING gin (moved_rows) WHERE moved_rows IS NOT NULL;

-- How often an effect was called, how often that certainly did not happen, and whether its last call was declared
-- harmless to repeat: with these, that nothing was called twice can be read from the table. `told_by` is the person
-- who said what became of a call that nobody knew about.
ALTER TABLE effects
    ADD COLUMN calls      integer NOT NULL DEFAULT 1,
    ADD COLUMN not_done   integer NOT NULL DEFAULT 0,
    ADD COLUMN retry_safe boolean NOT NULL DEFAULT false,
    ADD COLUMN told_by    text,
    ADD CONSTRAINT effects_calls CHECK (not_done BETWEEN 0 AND calls);
CREATE INDEX effects_claim ON effects (claim_seq);

-- One line an escalation, written by the statement that escalates, where `WEBHOOKS_NOTIFY_URL` is set: pending →
-- notifying → notified, or `dropped` when it is no news any more. Its phase sends it on; it tells of no line of its own.
CREATE TABLE notifications (
    id            bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    table_name    text        NOT NULL,
    key           text        NOT NULL,
    phase         text        NOT NULL,
    attempts_made integer     NOT NULL,
    reason        text,
    escalated_at  timestamptz NOT NULL DEFAULT statement_timestamp(),
    LIKE gated INCLUDING ALL,
    CONSTRAINT notifications_status CHECK (status IN ('pending', 'notifying', 'notified', 'dropped', 'escalated'))
) WITH (fillfactor = 80);
CREATE INDEX notifications_pending ON notifications (not_before, id) WHERE status = 'pending';
CREATE INDEX notifications_notifying ON notifications (id) WHERE status = 'notifying';
CREATE INDEX notifications_escalated ON notifications (id) WHERE status = 'escalated';
CREATE INDEX notifications_row ON notifications (table_name, key, escalated_at);

-- section 5: rejections

-- A request that was refused, so that it can be understood, and accepted once the secret is mended. `received_at` is the
-- receiver's own clock, against which the signed time was held; the same request within a minute only raises `times`.
-- A body past the size limit, or one that was not read to its end, is not kept: `body_bytes` says how much of it came.
-- Capped by count, size and age; `delivery` is what became of it when it was verified again.
CREATE TABLE rejections (
    id          bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    source      text        NOT NULL,
    cause       text        NOT NULL,
    headers     jsonb       NOT NULL DEFAULT '[]',
    body        bytea,
    body_bytes  bigint      NOT NULL,
    body_sha256 bytea,
    received_at timestamptz NOT NULL DEFAULT statement_timestamp(),
    last_at     timestamptz NOT NULL DEFAULT statement_timestamp(),
    times       bigint      NOT NULL DEFAULT 1,
    delivery    bigint,
    accepted_at timestamptz,
    CONSTRAINT rejections_body CHECK (octet_length(body) = body_bytes),
    CONSTRAINT rejections_times CHECK (times > 0 AND last_at >= received_at),
    CONSTRAINT rejections_accepted CHECK ((delivery IS NULL) = (accepted_at IS NULL))
);
ALTER TABLE rejections ALTER COLUMN body SET STORAGE EXTERNAL;
CREATE INDEX rejections_last ON rejections (last_at, id);

-- section 6: replay and feed

-- What a replay or an export selects, and what followers of the feed read: in the order in which deliveries became
-- visible, which ids are not.
CREATE INDEX deliveries_received_at ON deliveries (received_at, id);
CREATE INDEX deliveries_feed ON deliveries (accepted_xid, id) WHERE parent IS NULL AND replay_of IS NULL;
CREATE INDEX deliveries_replays ON deliveries (replay_of) WHERE replay_of IS NOT NULL;

-- section 7: retention

-- A delivery outlives its body (`pruned_at`) and its headers, so that a late copy is still known by its key. No index
-- is added: pruning walks `deliveries_received_at` in pages, and an index that names a body would make every accept
-- and every pruned line dearer.
ALTER TABLE deliveries
    ADD COLUMN pruned_at timestamptz,
    ADD COLUMN headers_pruned_at timestamptz,
    DROP CONSTRAINT deliveries_body,
    ADD CONSTRAINT deliveries_body CHECK ((body IS NULL) = (parent IS NOT NULL OR pruned_at IS NOT NULL));

-- section 8: reconciling

-- What a provider was asked to deliver again, so that a run that was interrupted goes on and nobody asks twice at once.
-- The line is written before the call; `answered` says that the provider agreed to it, and without that another run may
-- take over soon.
CREATE TABLE redeliveries (
    scope     text        NOT NULL,
    guid      text        NOT NULL,
    asked_at  timestamptz NOT NULL DEFAULT statement_timestamp(),
    answered  boolean     NOT NULL DEFAULT false,
    times     integer     NOT NULL DEFAULT 1,
    PRIMARY KEY (scope, guid),
    CONSTRAINT redeliveries_times CHECK (times > 0)
);

-- Which of many processes reconciles on its schedule: whoever moves `next_at` on. `whole_until` is the time up to which
-- nothing is missing any more, where the next round begins.
CREATE TABLE reconcile_turns (
    scope       text        PRIMARY KEY,
    taken_by    text        NOT NULL,
    taken_at    timestamptz NOT NULL DEFAULT statement_timestamp(),
    next_at     timestamptz NOT NULL,
    whole_until timestamptz
);

-- section 9: rows that refuse

CREATE TABLE stuck (
    table_name      text        NOT NULL,
    key             text        NOT NULL,
    phase           text        NOT NULL,
    what            text        NOT NULL,
    reason          text        NOT NULL,
    constraint_name text,
    since           timestamptz NOT NULL DEFAULT statement_timestamp(),
    seen_at         timestamptz NOT NULL DEFAULT statement_timestamp(),
    PRIMARY KEY (table_name, key),
    CONSTRAINT stuck_what CHECK (what IN ('claimed', 'freed'))
);

-- section 10: the fleet

-- One line a process. It lives while `seen_at` is not older than half a minute; one that was stopped in order counts as
-- long, since the next one may be on its way. `handles` are the events it has handlers for (`source/event`), `accepts` the
-- sources it knows; `flows` holds, per gated table of a worker, the statuses it knows and by ready status what it does
-- there. `degraded` is what is at fault in it, by name.
CREATE TABLE processes (
    id         text        PRIMARY KEY,
    app        text        NOT NULL,
    started_at timestamptz NOT NULL DEFAULT statement_timestamp(),
    seen_at    timestamptz NOT NULL DEFAULT statement_timestamp(),
    stopped_at timestamptz,
    handles    text[]      NOT NULL,
    accepts    text[]      NOT NULL,
    flows      jsonb       NOT NULL DEFAULT '{}',
    degraded   jsonb       NOT NULL DEFAULT '{}'
) WITH (fillfactor = 50);

-- What was ever declared about a ready status (`claimed: done, done`), and when it was first seen: of two living
-- processes that disagree, the declaration first seen later is in force.
CREATE TABLE flow_declarations (
    table_name  text        NOT NULL,
    ready       text        NOT NULL,
    declaration text        NOT NULL,
    first_seen  timestamptz NOT NULL DEFAULT statement_timestamp(),
    PRIMARY KEY (table_name, ready, declaration)
);

-- section 11: what a delivery wants

-- `wants` is the event (`source/event`; `source/` where it cannot be known) that whoever claimed the delivery has no
-- handler for, and another process has: only such a one claims it from then on, by the second index.
ALTER TABLE deliveries ADD COLUMN wants text;
DROP INDEX deliveries_received;
CREATE INDEX deliveries_received ON deliveries (not_before, id) WHERE status = 'received' AND wants IS NULL;
CREATE INDEX deliveries_wanting ON deliveries (wants, not_before, id) WHERE status = 'received' AND wants IS NOT NULL;
CREATE INDEX deliveries_exhausted ON deliveries (id) WHERE status = 'received' AND attempt_count >= max_attempts;

-- section 12: issues of repositories that are renamed, moved and deleted

-- A repository's number stays when it is renamed or given to somebody else. `repository` is what it is called as of
-- `repository_told_at`; `repository_gone_at` says that it was deleted. Companies from before, and those entered by hand,
-- are bound to the number by the first word of a repository that is called as they are.
ALTER TABLE companies
    ADD COLUMN repository_id      bigint,
    ADD COLUMN repository         text,
    ADD COLUMN repository_told_at timestamptz,
    ADD COLUMN repository_gone_at timestamptz,
    ADD CONSTRAINT companies_repository UNIQUE (repository_id),
    ADD CONSTRAINT companies_bound CHECK ((repository_id IS NULL) = (repository IS NULL)
        AND (repository_id IS NULL) = (repository_told_at IS NULL));
CREATE INDEX companies_unbound ON companies (lower(id)) WHERE repository_id IS NULL;

-- The newest of each kind of fact, so that events may be heard in any order. There is a line for each issue that
-- somebody was asked to work on, and for each that was heard of as closed, opened again or gone, since a word from
-- before that may still be on its way.
CREATE TABLE github_issues (
    repository_id bigint NOT NULL,
    number        bigint NOT NULL,
    told_at       timestamptz,
    agent         text,
    title         text,
    body          text,
    priority      text,
    closed_at     timestamptz,
    reopened_at   timestamptz,
    gone_at       timestamptz,
    PRIMARY KEY (repository_id, number),
    CONSTRAINT github_issues_word CHECK ((told_at IS NULL) = (agent IS NULL) AND (told_at IS NULL) = (title IS NULL)
        AND (told_at IS NULL) = (body IS NULL) AND (told_at IS NULL) = (priority IS NULL))
) WITH (fillfactor = 80);

-- Which repository the pull request is in, by its number.
ALTER TABLE patch_sessions ADD COLUMN repository_id bigint;

-- section 13: the events of a delivery

-- Of a delivery that was split, `part` is what each of its events is: what they have in common with the delivery, the
-- rest with each of them. It is made from the body, once, and goes with it.
ALTER TABLE deliveries ADD COLUMN part bytea;

-- section 14: what floods may not displace

-- A secret of ours makes the request's signature right, an earlier one or another source's: these have room of their
-- own. `sender` is the address that it came from, in IPv6 the network: of what many have sent, some of each is kept.
ALTER TABLE rejections ADD COLUMN proved boolean NOT NULL DEFAULT false, ADD COLUMN sender text;

-- section 15: decisions that a phase reads

-- In which visit of the row, and what its phase is told (`claim.decision`): JSON, as text because jsonb takes less.
ALTER TABLE decisions
    ADD COLUMN visit bigint,
    ADD COLUMN value text;
