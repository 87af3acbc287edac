INSERT INTO "decisions" (table_name, key, visit, decision, decided_by, reason, value)
VALUES (%(table)s, %(key)s, %(visit)s, %(decision)s, %(decided_by)s, %(reason)s, %(value)s)
