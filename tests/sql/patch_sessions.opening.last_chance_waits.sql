SELECT 1 AS found FROM (
    SELECT "sc_id", attempt_count, max_attempts FROM "patch_sessions"
    WHERE status = 'drafted' AND attempt_count < max_attempts AND not_before <= now() AND "sc_id"::text <> ALL(%(refusing)s)
    ORDER BY "not_before", "sc_id" LIMIT 1000
) AS t WHERE attempt_count > 0 AND attempt_count = max_attempts - 1
        AND coalesce((SELECT a.outcome FROM "attempts" AS a
            WHERE a.table_name = %(table)s AND a.key = "t"."sc_id"::text
            AND a.outcome NOT IN ('snoozed', 'interrupted') ORDER BY a.claimed_at DESC LIMIT 1), '') = 'expired' LIMIT 1
