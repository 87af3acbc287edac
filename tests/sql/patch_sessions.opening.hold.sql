UPDATE "patch_sessions" SET lease_until = greatest(lease_until, statement_timestamp() + %(lease)s)
WHERE "sc_id" = %(key)s AND status = 'opening' AND claim_seq = %(claim_seq)s AND lease_until IS NOT NULL
