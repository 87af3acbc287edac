WITH "moved rows" AS (
WITH "spent rows" AS MATERIALIZED (
    SELECT "id" FROM "deliveries" WHERE status = 'received' AND attempt_count >= max_attempts AND "id"::text <> ALL(%(refusing)s)
    ORDER BY "id" LIMIT 100 FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE "deliveries" AS t SET status = 'dead', claimed_from = 'received',
    last_error = coalesce(t.last_error, 'no attempt is left')
FROM "spent rows" WHERE "t"."id" = "spent rows"."id" AND t.status = 'received' AND t.attempt_count >= t.max_attempts
RETURNING "t"."id", "t"."id"::text AS "webhooks key", t.status, t.attempt_count, t.last_error
), "notifications made" AS (
    INSERT INTO "notifications" (table_name, key, phase, attempts_made, reason, status, max_attempts)
    SELECT 'deliveries', "id"::text, 'applying', attempt_count, last_error, 'pending', 20
    FROM "moved rows" WHERE status = 'dead'
)
SELECT "id", "webhooks key", status FROM "moved rows"
