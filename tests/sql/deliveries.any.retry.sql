UPDATE "deliveries" SET status = claimed_from, claimed_from = NULL, attempt_count = 0,
    max_attempts = CASE claimed_from WHEN 'received' THEN 5 ELSE max_attempts END, not_before = statement_timestamp(),
    last_error = coalesce(last_error, 'escalated by hand')
WHERE "id" = %(key)s AND status = 'dead' AND claimed_from IS NOT NULL
RETURNING "id", "id"::text AS "webhooks key", status, visit
