WITH "moved rows" AS (
WITH "spent rows" AS MATERIALIZED (
    SELECT "sc_id" FROM "patch_sessions" WHERE status = 'drafted' AND attempt_count >= max_attempts AND "sc_id"::text <> ALL(%(refusing)s)
    ORDER BY "sc_id" LIMIT 100 FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE "patch_sessions" AS t SET status = 'escalated', claimed_from = 'drafted',
    last_error = coalesce(t.last_error, 'no attempt is left')
FROM "spent rows" WHERE "t"."sc_id" = "spent rows"."sc_id" AND t.status = 'drafted' AND t.attempt_count >= t.max_attempts
RETURNING "t"."sc_id", "t"."sc_id"::text AS "webhooks key", t.status, t.attempt_count, t.last_error
), "notifications made" AS (
    INSERT INTO "notifications" (table_name, key, phase, attempts_made, reason, status, max_attempts)
    SELECT 'patch_sessions', "sc_id"::text, 'opening', attempt_count, last_error, 'pending', 20
    FROM "moved rows" WHERE status = 'escalated'
)
SELECT "sc_id", "webhooks key", status FROM "moved rows"
