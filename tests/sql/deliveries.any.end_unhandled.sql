WITH RECURSIVE named AS (
    (SELECT wants FROM "deliveries" WHERE status = 'received' AND wants IS NOT NULL ORDER BY wants LIMIT 1)
    UNION ALL
    SELECT (SELECT d.wants FROM "deliveries" AS d WHERE d.status = 'received' AND d.wants > n.wants
        ORDER BY d.wants LIMIT 1)
    FROM named AS n WHERE n.wants IS NOT NULL
), unhandled AS MATERIALIZED (
    SELECT w.wants FROM named AS w WHERE w.wants IS NOT NULL
        AND NOT EXISTS (SELECT FROM "processes" AS p WHERE (p.seen_at > coalesce((SELECT me.seen_at FROM "processes" AS me WHERE me.id = %(process)s), now()) - %(living)s) AND (w.wants = ANY(p.handles) OR w.wants IN (SELECT s.name || '/' FROM unnest(p.accepts) AS s (name))))
), ended AS MATERIALIZED (
    SELECT d.id FROM unhandled AS u JOIN "deliveries" AS d ON d.wants = u.wants
    WHERE d.status = 'received' ORDER BY d.id LIMIT %(limit)s FOR NO KEY UPDATE OF d SKIP LOCKED
)
UPDATE "deliveries" AS t SET status = 'ignored', wants = NULL, parked_on = NULL, parked_since = NULL,
    reason = CASE WHEN t.wants = t.source || '/' THEN %(no_source)s || t.source || ' any more'
        ELSE %(no_handler)s || substr(t.wants, length(t.source) + 2) END
FROM ended WHERE t.id = ended.id AND t.status = 'received' RETURNING t.id, t.reason
