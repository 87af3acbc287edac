WITH "given back" AS (
    UPDATE "patch_sessions" AS t SET status = 'received', claimed_from = NULL,
        attempt_count = greatest(attempt_count - 1, 0), claimed_by = NULL, claimed_at = NULL, lease_until = NULL
    WHERE status = 'clarifying' AND claim_seq >= %(fence)s AND claim_seq < %(fence)s + %(count)s
    RETURNING claim_seq
)
UPDATE "attempts" AS a SET ended_at = statement_timestamp(), outcome = 'interrupted',
    error = 'the answer to the claim was lost'
FROM "given back" AS g WHERE a.claim_seq = g.claim_seq AND a.ended_at IS NULL
