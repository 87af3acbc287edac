UPDATE patch_sessions SET status = 'in_review', "pull_request_number" = %(set_pull_request_number)s, "pull_request_url" = %(set_pull_request_url)s, claimed_by = NULL, claimed_at = NULL, lease_until = NULL, claimed_from = NULL, last_error = NULL, not_before = statement_timestamp()
WHERE sc_id = %(key)s AND status = 'opening' AND claim_seq = %(claim_seq)s AND lease_until IS NOT NULL
RETURNING statement_timestamp() AS ended_at
