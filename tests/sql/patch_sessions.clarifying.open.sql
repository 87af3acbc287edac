INSERT INTO "patch_sessions" (status, "sc_id", "title", "story_url", max_attempts)
VALUES ('received', %(set_sc_id)s, %(set_title)s, %(set_story_url)s, 5)
ON CONFLICT ("sc_id") DO NOTHING
RETURNING "sc_id", "sc_id"::text AS "webhooks key"
