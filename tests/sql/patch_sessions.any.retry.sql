UPDATE "patch_sessions" SET status = claimed_from, claimed_from = NULL, attempt_count = 0,
    max_attempts = CASE claimed_from WHEN 'received' THEN 5 WHEN 'clarified' THEN 3 WHEN 'drafted' THEN 5 WHEN 'merged' THEN 5 ELSE max_attempts END, not_before = statement_timestamp(),
    last_error = coalesce(last_error, 'escalated by hand')
WHERE "sc_id" = %(key)s AND status = 'escalated' AND claimed_from IS NOT NULL
RETURNING "sc_id", "sc_id"::text AS "webhooks key", status, visit
