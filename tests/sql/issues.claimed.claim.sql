UPDATE "issues" SET status = 'claimed', claim_seq = %(fence)s,
    claimed_from = 'open', attempt_count = attempt_count + 1,
    claimed_by = %(claimed_by)s, claimed_at = statement_timestamp(),
    lease_until = statement_timestamp() + %(lease)s
WHERE "id" = %(key)s AND status = 'open' AND attempt_count < max_attempts AND not_before <= now()
RETURNING "id", "company_id", "assigned_agent_id", "title", "body", "priority", "created_at", "external_ref", "visit", "attempt_count", "max_attempts", "claim_seq", "lease_until", "claimed_by", "claimed_at", "last_error", "id"::text AS "webhooks key"
