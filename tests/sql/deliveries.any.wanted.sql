WITH RECURSIVE named AS (
    (SELECT wants FROM "deliveries" WHERE status = 'received' AND wants IS NOT NULL ORDER BY wants LIMIT 1)
    UNION ALL
    SELECT (SELECT d.wants FROM "deliveries" AS d WHERE d.status = 'received' AND d.wants > n.wants
        ORDER BY d.wants LIMIT 1)
    FROM named AS n WHERE n.wants IS NOT NULL
) SELECT wants FROM named WHERE wants IS NOT NULL
