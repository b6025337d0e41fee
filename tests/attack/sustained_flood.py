"""Strangers that come again at once, each time with TLS and a request without a token, from one address or from many.

Alone: `python tests/attack/sustained_flood.py`; `--help` names its options.
"""

import asyncio
import itertools
import time
from typing import Any

from rig import Rate, Serving, addresses, contributing, elsewhere, judge, on_new_run, run_alone, unchecked

ARRIVALS = 50
NO_TOKEN = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def come_again(port: int, address: str, until_s: float, counts: dict[str, int]) -> None:
    context = unchecked()
    while time.monotonic() < until_s:
        try:
            async with asyncio.timeout(20):
                reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, local_addr=(address, 0))
                writer.write(NO_TOKEN)
                counts["asked"] += bool(await reader.read(4096))
                await reader.read(1)
                writer.close()
        except OSError:
            counts["refused"] += 1
        await asyncio.sleep(0.5)


async def _flood(port: int, strangers: int, addresses_used: int, seconds: float) -> dict[str, int]:
    counts = {"asked": 0, "refused": 0}
    sources = itertools.cycle(itertools.islice(addresses(), addresses_used))
    until_s = time.monotonic() + seconds
    await asyncio.gather(*(come_again(port, next(sources), until_s, counts) for _ in range(strangers)))
    return counts


def flood(port: int, strangers: int, addresses_used: int, seconds: float) -> dict[str, int]:
    return asyncio.run(_flood(port, strangers, addresses_used, seconds))


def attack(serving: Serving, strangers: int, addresses_used: int, seconds: float) -> dict[str, Any]:
    """A sustained flood does not stop a run: nobody is lost, and arrivals go on."""
    with contributing(serving):
        rate = Rate(serving)
        rate.measure("before", ARRIVALS)
        memory_mb = serving.resident_mb()
        with elsewhere(flood, serving.port, strangers, addresses_used, seconds) as result, rate.measured("meanwhile"):
            counts = result(seconds + 60)
        rate.measure("after", ARRIVALS)
        serving.check_well()
        after_mb = serving.settled_mb(memory_mb)
        figures = {
            "arrivals_per_s": rate.figures, "strangers": counts, "lost": serving.lost(),
            "memory_mb": [round(memory_mb), round(after_mb)],
        }  # fmt: skip
        return judge(
            figures,
            nobody_is_lost=not figures["lost"],
            arrivals_go_on=rate.figures["meanwhile"] > 0.2 * rate.figures["before"],
            memory_is_given_back=after_mb < 1.1 * memory_mb,
        )


if __name__ == "__main__":
    run_alone(on_new_run(attack), strangers=900, addresses_used=1, seconds=60.0)
