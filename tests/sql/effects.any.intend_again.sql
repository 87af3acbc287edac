UPDATE "effects" SET claim_seq = %(claim_seq)s, state = 'intended', input_hash = %(input_hash)s,
    error = NULL, ended_at = NULL, told_by = NULL, calls = calls + %(calls)s,
    not_done = not_done + %(not_done)s, retry_safe = %(retry_safe)s,
    intended_at = statement_timestamp(), call_until = statement_timestamp() + %(timeout)s
WHERE idempotency_key = %(key)s AND state = %(state)s AND claim_seq = %(found_seq)s
