INSERT INTO "effects" (idempotency_key, claim_seq, state, input_hash, retry_safe, call_until)
VALUES (%(key)s, %(claim_seq)s, 'intended', %(input_hash)s, %(retry_safe)s,
    statement_timestamp() + %(timeout)s)
ON CONFLICT (idempotency_key) DO NOTHING
