WITH "our rows" AS MATERIALIZED (
    SELECT "sc_id" FROM "patch_sessions"
    WHERE "sc_id" = ANY(%(key)s) AND status = 'finishing' AND claim_seq = ANY(%(claim_seqs)s) AND lease_until IS NOT NULL
    ORDER BY "sc_id" FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE "patch_sessions" AS t SET lease_until = statement_timestamp() + %(lease)s
FROM "our rows" WHERE "t"."sc_id" = "our rows"."sc_id" AND t.status = 'finishing' AND t.claim_seq = ANY(%(claim_seqs)s)
RETURNING t.claim_seq
