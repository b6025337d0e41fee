"""Requests one after the other on one connection without waiting for answers, none of which is ever read.

Alone: `python tests/attack/pipelined.py`; `--help` names its options.
"""

import contextlib
import threading
from typing import Any

from rig import Peak, Rate, Serving, addresses, connect, contributing, elsewhere, judge, on_new_run, run_alone, unchecked

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
AT_ONCE = 500
ARRIVALS = 50


def pour(port: int, requests: int, connections: int) -> int:
    """Over new connections when those before were ended. How many requests were sent."""
    request_counts = [0] * connections
    threads = [
        threading.Thread(target=_pour, args=(port, address, requests // connections, request_counts, i))
        for i, address in zip(range(connections), addresses(), strict=False)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(request_counts)


def _pour(port: int, address: str, requests: int, request_counts: list[int], number: int) -> None:
    context, attempts = unchecked(), 0
    while attempts < requests:
        with contextlib.suppress(OSError), context.wrap_socket(connect(port, address)) as pouring:
            while attempts < requests:
                pouring.sendall(REQUEST * AT_ONCE)
                attempts += AT_ONCE
                request_counts[number] += AT_ONCE
        attempts += AT_ONCE  # also of a connection that was refused: it must come to an end


def attack(serving: Serving, requests: int, connections: int) -> dict[str, Any]:
    """Pipelined requests take no memory."""
    with contributing(serving):
        rate = Rate(serving)
        rate.measure("before", ARRIVALS)
        memory_mb = serving.resident_mb()
        peak = Peak(serving)
        with elsewhere(pour, serving.port, requests, connections) as result, rate.measured("meanwhile"):
            request_count = result(600)
        peak_mb = peak.end()
        rate.measure("after", ARRIVALS)
        serving.check_well()
        after_mb = serving.settled_mb(memory_mb)
        figures = {
            "arrivals_per_s": rate.figures, "requests_sent": request_count, "lost": serving.lost(),
            "memory_mb": {"before": round(memory_mb), "peak": round(peak_mb), "after": round(after_mb)},
        }  # fmt: skip
        return judge(
            figures,
            memory_stays_flat=peak_mb < 1.25 * memory_mb,
            memory_is_given_back=after_mb < 1.1 * memory_mb,
            nobody_is_lost=not figures["lost"],
            arrivals_go_on=rate.figures["meanwhile"] > 0,
        )


if __name__ == "__main__":
    run_alone(on_new_run(attack), requests=1_500_000, connections=4)
