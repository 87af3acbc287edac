WITH parked AS MATERIALIZED (
    SELECT id FROM "deliveries" WHERE id = ANY(%(ids)s) AND parked_on IS NOT NULL AND status = 'received'
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE "deliveries" AS t SET not_before = statement_timestamp()
FROM parked WHERE t.id = parked.id AND t.status = 'received' RETURNING t.id, t.parked_on
