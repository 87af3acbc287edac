WITH "spent rows" AS MATERIALIZED (
    SELECT "id" FROM "issues" WHERE status = 'open' AND attempt_count >= max_attempts AND "id"::text <> ALL(%(refusing)s)
    ORDER BY "id" LIMIT 100 FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE "issues" AS t SET status = 'escalated', claimed_from = 'open',
    last_error = coalesce(t.last_error, 'no attempt is left')
FROM "spent rows" WHERE "t"."id" = "spent rows"."id" AND t.status = 'open' AND t.attempt_count >= t.max_attempts
RETURNING "t"."id", "t"."id"::text AS "webhooks key", t.status
