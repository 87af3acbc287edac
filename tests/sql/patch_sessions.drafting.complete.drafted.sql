WITH moved AS (
UPDATE patch_sessions SET status = 'drafted', "patch" = %(set_patch)s, "base_commit" = %(set_base_commit)s, claimed_by = NULL, claimed_at = NULL, lease_until = NULL, claimed_from = NULL, last_error = NULL, not_before = statement_timestamp(), visit = %(visit)s, attempt_count = 0, max_attempts = 5
WHERE sc_id = %(key)s AND status = 'drafting' AND claim_seq = %(claim_seq)s AND lease_until IS NOT NULL
RETURNING status
), closed AS (
    UPDATE attempts AS a
    SET ended_at = statement_timestamp(), outcome = %(outcome)s, error = %(error)s
    FROM moved WHERE a.claim_seq = %(claim_seq)s AND a.ended_at IS NULL
)
SELECT status FROM moved
