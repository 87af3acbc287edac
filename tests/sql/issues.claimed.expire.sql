WITH "late claims" AS MATERIALIZED (
    SELECT "id", claim_seq FROM "issues" WHERE status = 'claimed' AND lease_until < now() AND "id"::text <> ALL(%(refusing)s)
    ORDER BY "id" LIMIT 100 FOR NO KEY UPDATE SKIP LOCKED
), "freed rows" AS (
    UPDATE "issues" AS t SET
        status = CASE WHEN t.attempt_count >= t.max_attempts THEN 'escalated' ELSE 'open' END,
        claimed_from = CASE WHEN t.attempt_count >= t.max_attempts THEN 'open' END,
        not_before = statement_timestamp() + least(%(longest)s, %(first)s * power(2, least(t.attempt_count - 1, 20))) * %(factor)s,
        last_error = 'lease expired: ' || coalesce(t.claimed_by, 'somebody') || ' stopped answering',
        claimed_by = NULL, claimed_at = NULL, lease_until = NULL
    FROM "late claims" AS l WHERE "t"."id" = "l"."id" AND t.status = 'claimed'
        AND t.claim_seq IS NOT DISTINCT FROM l.claim_seq
    RETURNING t.*
), "closed attempts" AS (
    UPDATE "attempts" AS a SET
        ended_at = statement_timestamp(), outcome = 'expired', error = f.last_error
    FROM "freed rows" AS f WHERE a.claim_seq = f.claim_seq AND a.ended_at IS NULL
)
SELECT "id", "id"::text AS "webhooks key", status FROM "freed rows"
