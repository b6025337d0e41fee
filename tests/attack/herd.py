"""Many honest machines behind one router come back at the same moment: each looks at the certificate, then opens two connections
with the token, and tries again after a pause that doubles, as machines do.

Alone: `python tests/attack/herd.py`; `--help` names its options.
"""

import asyncio
import time
from typing import Any

from rig import Serving, elsewhere, judge, on_new_run, run_alone, unchecked

ROUTER = "127.8.0.1"
WITHIN_S = 20.0


async def visit(port: int, headers: str) -> asyncio.StreamWriter:
    """A connection over which one request was answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=unchecked(), local_addr=(ROUTER, 0))
    writer.write(f"GET /v1/clock HTTP/1.1\r\nhost: x\r\n{headers}\r\n".encode())
    answer = await reader.readuntil(b"\r\n")
    if answer.split()[1] not in (b"200", b"401"):
        writer.close()
        raise ConnectionError(answer)
    return writer


async def come_in(port: int, secret: str) -> tuple[float, int]:
    """Seconds until the machine is in, and how often it had to try again."""
    began, retries, authorized = time.monotonic(), 0, f"authorization: Bearer {secret}\r\n"
    for headers in ("", authorized, authorized):
        pause_s = 0.1
        while True:
            try:
                writer = await visit(port, headers)
                break
            except (OSError, EOFError):
                retries += 1
                await asyncio.sleep(pause_s)
                pause_s = min(2.0, 2 * pause_s)
        if not headers:
            writer.close()
    return time.monotonic() - began, retries


async def _stampede(port: int, secret: str, machines: int) -> list[tuple[float, int]]:
    return await asyncio.gather(*(come_in(port, secret) for _ in range(machines)))


def stampede(port: int, secret: str, machines: int) -> list[tuple[float, int]]:
    return asyncio.run(_stampede(port, secret, machines))


def attack(serving: Serving, machines: int) -> dict[str, Any]:
    """All machines behind one router are in within seconds."""
    with elsewhere(stampede, serving.port, serving.secret, machines) as result:
        times = result(60.0)
        serving.check_well()
    last_s = max(seconds for seconds, _ in times)
    figures = {"machines": machines, "last_in_after_s": round(last_s, 1), "tries_again": sum(retries for _, retries in times)}
    return judge(figures, all_are_in_within_seconds=last_s < WITHIN_S)


if __name__ == "__main__":
    run_alone(on_new_run(attack), machines=200)
