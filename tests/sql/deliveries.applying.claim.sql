UPDATE "deliveries" SET status = 'applying', claim_seq = %(fence)s,
    claimed_from = 'received', attempt_count = attempt_count + 1,
    claimed_by = %(claimed_by)s, claimed_at = statement_timestamp(),
    lease_until = statement_timestamp() + %(lease)s
WHERE "id" = %(key)s AND status = 'received' AND attempt_count < max_attempts AND not_before <= now()
RETURNING "id", "source", "dedup_key", "position", "parent", "origin", "received_at", "parked_since", "reason", "wants", "visit", "attempt_count", "max_attempts", "claim_seq", "lease_until", "claimed_by", "claimed_at", "last_error", "id"::text AS "webhooks key"
