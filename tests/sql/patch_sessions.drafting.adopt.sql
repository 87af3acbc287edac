WITH "bare claims" AS MATERIALIZED (
    SELECT "sc_id" FROM "patch_sessions" WHERE status = 'drafting' AND lease_until IS NULL AND "sc_id"::text <> ALL(%(refusing)s)
    ORDER BY "sc_id" LIMIT 100 FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE "patch_sessions" AS t SET claimed_from = 'clarified', lease_until = statement_timestamp() + %(lease)s,
    claimed_at = statement_timestamp(), claimed_by = coalesce(t.claimed_by, 'somebody by hand'),
    claim_seq = NULL
FROM "bare claims" WHERE "t"."sc_id" = "bare claims"."sc_id" AND t.status = 'drafting' AND t.lease_until IS NULL
RETURNING "t"."sc_id", "t"."sc_id"::text AS "webhooks key", t.status
