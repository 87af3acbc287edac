SELECT claim_seq FROM "patch_sessions" WHERE "sc_id" = ANY(%(key)s) AND status = 'clarifying' AND claim_seq = ANY(%(claim_seqs)s) AND lease_until IS NOT NULL
