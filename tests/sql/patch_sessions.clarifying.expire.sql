WITH "late claims" AS MATERIALIZED (
    SELECT "sc_id", claim_seq FROM "patch_sessions" WHERE status = 'clarifying' AND lease_until < now() AND "sc_id"::text <> ALL(%(refusing)s)
    ORDER BY "sc_id" LIMIT 100 FOR NO KEY UPDATE SKIP LOCKED
), "freed rows" AS (
    UPDATE "patch_sessions" AS t SET
        status = CASE WHEN t.attempt_count >= t.max_attempts THEN 'escalated' ELSE 'received' END,
        claimed_from = CASE WHEN t.attempt_count >= t.max_attempts THEN 'received' END,
        not_before = statement_timestamp() + least(%(longest)s, %(first)s * power(2, least(t.attempt_count - 1, 20))) * %(factor)s,
        last_error = 'lease expired: ' || coalesce(t.claimed_by, 'somebody') || ' stopped answering',
        claimed_by = NULL, claimed_at = NULL, lease_until = NULL
    FROM "late claims" AS l WHERE "t"."sc_id" = "l"."sc_id" AND t.status = 'clarifying'
        AND t.claim_seq IS NOT DISTINCT FROM l.claim_seq
    RETURNING t.*
), "closed attempts" AS (
    UPDATE "attempts" AS a SET
        ended_at = statement_timestamp(), outcome = 'expired', error = f.last_error
    FROM "freed rows" AS f WHERE a.claim_seq = f.claim_seq AND a.ended_at IS NULL
)
SELECT "sc_id", "sc_id"::text AS "webhooks key", status FROM "freed rows"
