WITH "moved rows" AS (
UPDATE "deliveries" SET status = 'processed', "event" = %(set_event)s, "reason" = %(set_reason)s, "parked_on" = %(set_parked_on)s, "parked_since" = %(set_parked_since)s, "wants" = %(set_wants)s, "moved_rows" = %(set_moved_rows)s, claimed_by = NULL, claimed_at = NULL, lease_until = NULL, claimed_from = NULL, last_error = NULL, not_before = statement_timestamp()
WHERE "id" = ANY(%(key)s) AND status = 'applying' AND claim_seq = ANY(%(claim_seqs)s) AND lease_until IS NOT NULL
RETURNING status, claim_seq
), "closed attempts" AS (
    UPDATE "attempts" AS a
    SET ended_at = statement_timestamp(), outcome = %(outcome)s, error = %(error)s
    FROM "moved rows" AS m WHERE a.claim_seq = m.claim_seq AND a.ended_at IS NULL
)
SELECT status, claim_seq FROM "moved rows"
