"""A process that claims a row and holds it: `python -m holder URL KEY LEASE_S`. It says so in one line."""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta

from gates import a_gate

from webhooks.pool import Pool


async def hold(url: str, key: int, lease: timedelta) -> None:
    gate = a_gate(lease=lease)
    async with Pool.open(url) as pool, gate.claim(pool, "drafting", key) as claim:
        assert claim is not None
        sys.stdout.write(f"holds {claim.label} as {claim.claim_seq}\n")
        sys.stdout.flush()
        # A line on standard input lets it go on.
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        await claim.complete(patch="from the holder")


if __name__ == "__main__":
    asyncio.run(hold(sys.argv[1], int(sys.argv[2]), timedelta(seconds=float(sys.argv[3]))))
