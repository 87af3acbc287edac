WITH "moved rows" AS (
UPDATE "patch_sessions" SET status = 'clarified', claimed_by = NULL, claimed_at = NULL, lease_until = NULL, claimed_from = NULL, last_error = NULL, not_before = statement_timestamp(), visit = %(visit)s + array_position(%(claim_seqs)s::bigint[], claim_seq), attempt_count = 0, max_attempts = 3
WHERE "sc_id" = ANY(%(key)s) AND status = 'clarifying' AND claim_seq = ANY(%(claim_seqs)s) AND lease_until IS NOT NULL
RETURNING status, claim_seq
), "closed attempts" AS (
    UPDATE "attempts" AS a
    SET ended_at = statement_timestamp(), outcome = %(outcome)s, error = %(error)s
    FROM "moved rows" AS m WHERE a.claim_seq = m.claim_seq AND a.ended_at IS NULL
)
SELECT status, claim_seq FROM "moved rows"
