UPDATE "issues" SET status = 'resolved', claimed_by = NULL, claimed_at = NULL, lease_until = NULL, claimed_from = NULL, last_error = NULL, not_before = statement_timestamp()
WHERE "id" = %(key)s AND status IN ('open', 'claimed', 'escalated')
RETURNING "id", "id"::text AS "webhooks key", claim_seq
