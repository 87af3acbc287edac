SELECT id FROM "deliveries" WHERE parked_on = ANY(%(rows)s) AND status = 'received' ORDER BY id
