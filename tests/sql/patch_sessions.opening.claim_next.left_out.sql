WITH "due rows" AS MATERIALIZED (
    SELECT "sc_id", attempt_count FROM "patch_sessions" AS t
    WHERE status = 'drafted' AND attempt_count < max_attempts AND not_before <= now() AND "sc_id"::text <> ALL(%(refusing)s)
    ORDER BY "not_before", "sc_id" LIMIT %(limit)s FOR NO KEY UPDATE SKIP LOCKED
), "placed rows" AS MATERIALIZED (
    SELECT "sc_id", row_number() OVER () AS "claim order",
        CASE WHEN attempt_count > 0 THEN coalesce((SELECT a.outcome FROM "attempts" AS a
            WHERE a.table_name = %(table)s AND a.key = "t"."sc_id"::text
            AND a.outcome NOT IN ('snoozed', 'interrupted') ORDER BY a.claimed_at DESC LIMIT 1), '') = 'expired' ELSE false END AS "is suspect"
    FROM "due rows" AS t
), "claimed rows" AS (
    UPDATE "patch_sessions" AS t SET status = 'opening', claim_seq = %(fence)s + "claim order" - 1,
    claimed_from = 'drafted', attempt_count = attempt_count + 1,
    claimed_by = %(claimed_by)s, claimed_at = statement_timestamp(),
    lease_until = statement_timestamp() + %(lease)s
    FROM "placed rows" WHERE "t"."sc_id" = "placed rows"."sc_id" AND t.status = 'drafted' AND (
        "claim order" = 1 OR ("claim order" <
            (SELECT min("claim order") FROM "placed rows" WHERE "is suspect")) IS NOT FALSE)
    RETURNING t.*
), "recorded attempts" AS (
    INSERT INTO "attempts" (claim_seq, table_name, key, phase, visit, attempt, claimed_by, claimed_at)
    SELECT claim_seq, %(table)s, "sc_id"::text, 'opening', visit, attempt_count, claimed_by, claimed_at
    FROM "claimed rows"
)
SELECT "sc_id", "title", "story_url", "question", "answer", "patch", "base_commit", "opened_at", "visit", "attempt_count", "max_attempts", "claim_seq", "lease_until", "claimed_by", "claimed_at", "last_error", "sc_id"::text AS "webhooks key", "not_before"::text AS "webhooks mark 0", "sc_id"::text AS "webhooks mark 1", (SELECT count(*) FROM "placed rows") AS "webhooks due",
    (SELECT "is suspect" FROM "placed rows" WHERE "claim order" = 1) AS "webhooks suspect" FROM "claimed rows"
