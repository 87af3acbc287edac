WITH "bare claims" AS MATERIALIZED (
    SELECT "id" FROM "deliveries" WHERE status = 'applying' AND lease_until IS NULL AND "id"::text <> ALL(%(refusing)s)
    ORDER BY "id" LIMIT 100 FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE "deliveries" AS t SET claimed_from = 'received', lease_until = statement_timestamp() + %(lease)s,
    claimed_at = statement_timestamp(), claimed_by = coalesce(t.claimed_by, 'somebody by hand'),
    claim_seq = NULL
FROM "bare claims" WHERE "t"."id" = "bare claims"."id" AND t.status = 'applying' AND t.lease_until IS NULL
RETURNING "t"."id", "t"."id"::text AS "webhooks key", t.status
