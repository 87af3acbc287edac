UPDATE "patch_sessions" SET status = 'merged', "merged_at" = %(set_merged_at)s, claimed_by = NULL, claimed_at = NULL, lease_until = NULL, claimed_from = NULL, last_error = NULL, not_before = statement_timestamp(), visit = %(visit)s, attempt_count = 0, max_attempts = 5
WHERE "sc_id" = %(key)s AND status IN ('in_review', 'closed')
RETURNING "sc_id", "sc_id"::text AS "webhooks key", claim_seq
