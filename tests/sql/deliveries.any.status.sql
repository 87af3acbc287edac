SELECT status FROM "deliveries" WHERE "id" = %(key)s
