SELECT claim_seq FROM "deliveries" WHERE "id" = ANY(%(key)s) AND status = 'applying' AND claim_seq = ANY(%(claim_seqs)s) AND lease_until IS NOT NULL
