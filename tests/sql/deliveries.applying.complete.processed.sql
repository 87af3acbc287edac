UPDATE deliveries SET status = 'processed', "event" = %(set_event)s, "reason" = %(set_reason)s, "parked_on" = %(set_parked_on)s, "parked_since" = %(set_parked_since)s, "moved_rows" = %(set_moved_rows)s, claimed_by = NULL, claimed_at = NULL, lease_until = NULL, claimed_from = NULL, last_error = NULL, not_before = statement_timestamp()
WHERE id = %(key)s AND status = 'applying' AND claim_seq = %(claim_seq)s AND lease_until IS NOT NULL
RETURNING statement_timestamp() AS ended_at
