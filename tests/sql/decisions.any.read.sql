SELECT decided_by, reason, decided_at, value FROM "decisions"
WHERE table_name = %(table)s AND key = %(key)s AND visit = %(visit)s AND decision = 'retry'
ORDER BY value IS NULL, id DESC LIMIT 1
