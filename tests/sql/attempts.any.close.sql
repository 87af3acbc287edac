UPDATE "attempts" SET ended_at = statement_timestamp(), outcome = %(outcome)s, error = %(error)s
WHERE claim_seq = %(claim_seq)s AND ended_at IS NULL
