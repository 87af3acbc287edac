UPDATE "issues" SET status = 'open', "result" = %(set_result)s, "assigned_agent_id" = %(set_assigned_agent_id)s, "title" = %(set_title)s, "body" = %(set_body)s, "priority" = %(set_priority)s, "told_at" = %(set_told_at)s, claimed_by = NULL, claimed_at = NULL, lease_until = NULL, claimed_from = NULL, last_error = NULL, not_before = statement_timestamp(), visit = %(visit)s, attempt_count = 0, max_attempts = 5
WHERE "id" = %(key)s AND status = 'resolved'
RETURNING "id", "id"::text AS "webhooks key", claim_seq
