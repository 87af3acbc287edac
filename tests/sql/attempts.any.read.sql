SELECT outcome FROM "attempts" WHERE claim_seq = %(claim_seq)s
