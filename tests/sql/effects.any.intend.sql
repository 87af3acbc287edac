INSERT INTO effects (idempotency_key, claim_seq, state, input_hash, call_until)
VALUES (%(key)s, %(claim_seq)s, 'intended', %(input_hash)s, statement_timestamp() + %(timeout)s)
ON CONFLICT DO NOTHING
