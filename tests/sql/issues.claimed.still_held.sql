SELECT claim_seq FROM "issues" WHERE "id" = ANY(%(key)s) AND status = 'claimed' AND claim_seq = ANY(%(claim_seqs)s) AND lease_until IS NOT NULL
