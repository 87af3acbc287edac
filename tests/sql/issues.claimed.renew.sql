WITH "our rows" AS MATERIALIZED (
    SELECT "id" FROM "issues"
    WHERE "id" = ANY(%(key)s) AND status = 'claimed' AND claim_seq = ANY(%(claim_seqs)s) AND lease_until IS NOT NULL
    ORDER BY "id" FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE "issues" AS t SET lease_until = statement_timestamp() + %(lease)s
FROM "our rows" WHERE "t"."id" = "our rows"."id" AND t.status = 'claimed' AND t.claim_seq = ANY(%(claim_seqs)s)
RETURNING t.claim_seq
