UPDATE "patch_sessions" SET status = 'clarified', "answer" = %(set_answer)s, "answered_by" = %(set_answered_by)s, claimed_by = NULL, claimed_at = NULL, lease_until = NULL, claimed_from = NULL, last_error = NULL, not_before = statement_timestamp(), visit = %(visit)s, attempt_count = 0, max_attempts = 3
WHERE "sc_id" = %(key)s AND status = 'asked'
RETURNING "sc_id", "sc_id"::text AS "webhooks key", claim_seq
