UPDATE "deliveries" SET lease_until = greatest(lease_until, statement_timestamp() + %(lease)s)
WHERE "id" = %(key)s AND status = 'applying' AND claim_seq = %(claim_seq)s AND lease_until IS NOT NULL
