WITH "our rows" AS MATERIALIZED (
    SELECT "id" FROM "deliveries"
    WHERE "id" = ANY(%(key)s) AND status = 'applying' AND claim_seq = ANY(%(claim_seqs)s) AND lease_until IS NOT NULL
    ORDER BY "id" FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE "deliveries" AS t SET lease_until = statement_timestamp() + %(lease)s
FROM "our rows" WHERE "t"."id" = "our rows"."id" AND t.status = 'applying' AND t.claim_seq = ANY(%(claim_seqs)s)
RETURNING t.claim_seq
