UPDATE "patch_sessions" SET status = 'drafting', claim_seq = %(fence)s,
    claimed_from = 'clarified', attempt_count = attempt_count + 1,
    claimed_by = %(claimed_by)s, claimed_at = statement_timestamp(),
    lease_until = statement_timestamp() + %(lease)s
WHERE "sc_id" = %(key)s AND status = 'clarified' AND attempt_count < max_attempts AND not_before <= now()
RETURNING "sc_id", "title", "story_url", "question", "answer", "patch", "base_commit", "opened_at", "visit", "attempt_count", "max_attempts", "claim_seq", "lease_until", "claimed_by", "claimed_at", "last_error", "sc_id"::text AS "webhooks key"
