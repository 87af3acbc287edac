WITH "moved rows" AS (
UPDATE "issues" SET status = CASE WHEN (%(escalate)s OR attempt_count - %(refund)s >= max_attempts) THEN 'escalated' ELSE 'open' END,
    claimed_from = CASE WHEN (%(escalate)s OR attempt_count - %(refund)s >= max_attempts) THEN 'open' END,
    attempt_count = greatest(attempt_count - %(refund)s, 0),
    not_before = statement_timestamp() + %(delay)s, last_error = coalesce(%(error)s, last_error),
    claimed_by = NULL, claimed_at = NULL, lease_until = NULL
WHERE "id" = %(key)s AND status = 'claimed' AND claim_seq = %(claim_seq)s AND lease_until IS NOT NULL
RETURNING "id", status, claim_seq, attempt_count, last_error
), "closed attempts" AS (
    UPDATE "attempts" AS a
    SET ended_at = statement_timestamp(), outcome = %(outcome)s, error = %(error)s
    FROM "moved rows" AS m WHERE a.claim_seq = m.claim_seq AND a.ended_at IS NULL
), "notifications made" AS (
    INSERT INTO "notifications" (table_name, key, phase, attempts_made, reason, status, max_attempts)
    SELECT 'issues', "id"::text, 'claimed', attempt_count, last_error, 'pending', 20
    FROM "moved rows" WHERE status = 'escalated'
)
SELECT status, claim_seq FROM "moved rows"
