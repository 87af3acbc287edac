INSERT INTO "deliveries" (source, dedup_key, position, parent, origin, received_at, event, wants, part,
    status, max_attempts, not_before)
SELECT d.source, d.dedup_key, new.position, d.id, d.origin, d.received_at, new.event, new.wants,
    new.part, 'received', %(max_attempts)s,
    statement_timestamp() + greatest(new.place - %(at_once)s, 0) * %(apart)s::interval
FROM "deliveries" AS d, unnest(%(positions)b::integer[], %(events)b::text[], %(wants)b::text[],
    %(parts)b::bytea[]) WITH ORDINALITY AS new (position, event, wants, part, place)
WHERE d.id = %(id)s ORDER BY new.place
ON CONFLICT (source, dedup_key, position) DO NOTHING
RETURNING id, wants IS NULL AND not_before <= statement_timestamp() AS due
