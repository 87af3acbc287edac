WITH "moved rows" AS (
UPDATE "patch_sessions" SET status = 'drafted', "patch" = %(set_patch)s, "base_commit" = %(set_base_commit)s, claimed_by = NULL, claimed_at = NULL, lease_until = NULL, claimed_from = NULL, last_error = NULL, not_before = statement_timestamp(), visit = %(visit)s + array_position(%(claim_seqs)s::bigint[], claim_seq), attempt_count = 0, max_attempts = 5
WHERE "sc_id" = ANY(%(key)s) AND status = 'drafting' AND claim_seq = ANY(%(claim_seqs)s) AND lease_until IS NOT NULL
RETURNING status, claim_seq
), "closed attempts" AS (
    UPDATE "attempts" AS a
    SET ended_at = statement_timestamp(), outcome = %(outcome)s, error = %(error)s
    FROM "moved rows" AS m WHERE a.claim_seq = m.claim_seq AND a.ended_at IS NULL
)
SELECT status, claim_seq FROM "moved rows"
