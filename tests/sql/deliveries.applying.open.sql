INSERT INTO "deliveries" (status, "source", "dedup_key", "position", "parent", "origin", "received_at", "event", "wants", max_attempts)
VALUES ('received', %(set_source)s, %(set_dedup_key)s, %(set_position)s, %(set_parent)s, %(set_origin)s, %(set_received_at)s, %(set_event)s, %(set_wants)s, 5)
ON CONFLICT DO NOTHING
RETURNING "id"
