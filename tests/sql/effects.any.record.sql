UPDATE "effects" SET state = %(state)s, result = %(result)s, error = %(error)s,
    not_done = not_done + (%(state)s = 'failed')::integer, ended_at = statement_timestamp()
WHERE idempotency_key = %(key)s AND claim_seq = %(claim_seq)s AND state = 'intended'
