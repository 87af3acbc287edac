SELECT state, claim_seq, input_hash, result, call_until - statement_timestamp() AS call_left
FROM "effects" WHERE idempotency_key = %(key)s
