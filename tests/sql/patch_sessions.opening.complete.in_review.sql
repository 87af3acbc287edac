WITH "moved rows" AS (
UPDATE "patch_sessions" SET status = 'in_review', "pull_request_number" = %(set_pull_request_number)s, "pull_request_url" = %(set_pull_request_url)s, claimed_by = NULL, claimed_at = NULL, lease_until = NULL, claimed_from = NULL, last_error = NULL, not_before = statement_timestamp()
WHERE "sc_id" = ANY(%(key)s) AND status = 'opening' AND claim_seq = ANY(%(claim_seqs)s) AND lease_until IS NOT NULL
RETURNING status, claim_seq
), "closed attempts" AS (
    UPDATE "attempts" AS a
    SET ended_at = statement_timestamp(), outcome = %(outcome)s, error = %(error)s
    FROM "moved rows" AS m WHERE a.claim_seq = m.claim_seq AND a.ended_at IS NULL
)
SELECT status, claim_seq FROM "moved rows"
