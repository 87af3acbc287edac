WITH "moved rows" AS (
UPDATE "patch_sessions" SET status = CASE WHEN (%(escalate)s OR attempt_count - %(refund)s >= max_attempts) THEN 'escalated' ELSE 'clarified' END,
    claimed_from = CASE WHEN (%(escalate)s OR attempt_count - %(refund)s >= max_attempts) THEN 'clarified' END,
    attempt_count = greatest(attempt_count - %(refund)s, 0),
    not_before = statement_timestamp() + %(delay)s, last_error = coalesce(%(error)s, last_error),
    claimed_by = NULL, claimed_at = NULL, lease_until = NULL
WHERE "sc_id" = %(key)s AND status = 'drafting' AND claim_seq = %(claim_seq)s AND lease_until IS NOT NULL
RETURNING status, claim_seq
), "closed attempts" AS (
    UPDATE "attempts" AS a
    SET ended_at = statement_timestamp(), outcome = %(outcome)s, error = %(error)s
    FROM "moved rows" AS m WHERE a.claim_seq = m.claim_seq AND a.ended_at IS NULL
)
SELECT status, claim_seq FROM "moved rows"
