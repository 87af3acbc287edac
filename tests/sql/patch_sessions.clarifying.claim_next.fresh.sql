WITH "due rows" AS MATERIALIZED (
    SELECT "sc_id" FROM "patch_sessions" AS t
    WHERE status = 'received' AND attempt_count < max_attempts AND not_before <= now() AND attempt_count = 0
    ORDER BY "not_before", "sc_id" LIMIT %(limit)s FOR NO KEY UPDATE SKIP LOCKED
), "placed rows" AS (
    SELECT "sc_id", row_number() OVER () AS "claim order" FROM "due rows"
), "claimed rows" AS (
    UPDATE "patch_sessions" AS t SET status = 'clarifying', claim_seq = %(fence)s + "claim order" - 1,
    claimed_from = 'received', attempt_count = attempt_count + 1,
    claimed_by = %(claimed_by)s, claimed_at = statement_timestamp(),
    lease_until = statement_timestamp() + %(lease)s
    FROM "placed rows" WHERE "t"."sc_id" = "placed rows"."sc_id" AND t.status = 'received'
    RETURNING t.*
), "recorded attempts" AS (
    INSERT INTO "attempts" (claim_seq, table_name, key, phase, visit, attempt, claimed_by, claimed_at)
    SELECT claim_seq, %(table)s, "sc_id"::text, 'clarifying', visit, attempt_count, claimed_by, claimed_at
    FROM "claimed rows"
)
SELECT "sc_id", "title", "story_url", "question", "answer", "patch", "base_commit", "opened_at", "visit", "attempt_count", "max_attempts", "claim_seq", "lease_until", "claimed_by", "claimed_at", "not_before"::text AS "webhooks mark 0", "sc_id"::text AS "webhooks mark 1" FROM "claimed rows"
