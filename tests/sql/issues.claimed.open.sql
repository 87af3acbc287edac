INSERT INTO "issues" (status, "company_id", "assigned_agent_id", "title", "body", "priority", "created_at", "external_ref", "told_at", max_attempts)
VALUES ('open', %(set_company_id)s, %(set_assigned_agent_id)s, %(set_title)s, %(set_body)s, %(set_priority)s, %(set_created_at)s, %(set_external_ref)s, %(set_told_at)s, 5)
ON CONFLICT ("company_id", "external_ref") DO NOTHING
RETURNING "id", "id"::text AS "webhooks key"
