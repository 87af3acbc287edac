SELECT w.wants FROM unnest(%(wants)s::text[]) AS w (wants)
WHERE EXISTS (SELECT FROM "processes" AS p WHERE (p.seen_at > coalesce((SELECT me.seen_at FROM "processes" AS me WHERE me.id = %(process)s), now()) - %(living)s) AND (w.wants = ANY(p.handles) OR w.wants IN (SELECT s.name || '/' FROM unnest(p.accepts) AS s (name))))
