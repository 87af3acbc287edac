INSERT INTO "decisions" (table_name, key, decision, decided_by, reason)
VALUES (%(table)s, %(key)s, %(decision)s, %(decided_by)s, %(reason)s)
