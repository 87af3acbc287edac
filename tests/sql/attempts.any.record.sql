INSERT INTO "attempts" (claim_seq, table_name, key, phase, visit, attempt, claimed_by, claimed_at)
VALUES (%(claim_seq)s, %(table)s, %(key)s, %(phase)s, %(visit)s, %(attempt)s, %(claimed_by)s, %(claimed_at)s)
