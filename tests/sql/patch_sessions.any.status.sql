SELECT status FROM "patch_sessions" WHERE "sc_id" = %(key)s
