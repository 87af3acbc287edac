SELECT status FROM "issues" WHERE "id" = %(key)s
