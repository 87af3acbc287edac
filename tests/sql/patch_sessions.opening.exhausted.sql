WITH "spent rows" AS MATERIALIZED (
    SELECT "sc_id" FROM "patch_sessions" WHERE status = 'drafted' AND attempt_count >= max_attempts AND "sc_id"::text <> ALL(%(refusing)s)
    ORDER BY "sc_id" LIMIT 100 FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE "patch_sessions" AS t SET status = 'escalated', claimed_from = 'drafted',
    last_error = coalesce(t.last_error, 'no attempt is left')
FROM "spent rows" WHERE "t"."sc_id" = "spent rows"."sc_id" AND t.status = 'drafted' AND t.attempt_count >= t.max_attempts
RETURNING "t"."sc_id", "t"."sc_id"::text AS "webhooks key", t.status
