"""Connections that ask for nothing: TCP without a word of TLS, TLS without a request, and requests without a token that are kept
open. The run may open few files, and honest machines must go on contributing.

Alone: `python tests/attack/idle_connections.py`; `--help` names its options.
"""

import contextlib
import itertools
import socket
import time
from pathlib import Path
from typing import Any

from rig import Failed, Rate, Serving, addresses, connect, connect_many, contributing, is_open, judge, run_alone, unchecked, until

NO_TOKEN = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
GONE_S = 15.0
FEW, AT_ONCE_S = 200, 5.0
"""How many connections one address may have at most, and how soon the others are closed."""


def open_tcp(port: int, address: str) -> socket.socket:
    return connect(port, address)


def open_tls(port: int, address: str) -> socket.socket:
    return unchecked().wrap_socket(connect(port, address))


def ask_without_token(port: int, address: str) -> socket.socket:
    opened = open_tls(port, address)
    opened.sendall(NO_TOKEN)
    answer = opened.recv(4096)
    if not answer.startswith((b"HTTP/1.1 401", b"HTTP/1.1 429")) and answer:
        raise Failed(f"without a token there was an answer: {answer!r}")
    return opened


KINDS = (open_tcp, open_tls, ask_without_token)


def attack(folder: Path, connections: int, addresses_used: int, descriptors: int, arrivals: int) -> dict[str, Any]:
    """Idle connections do not stop a run: `arrivals` come in while connections of each kind are held."""
    with Serving(folder, descriptors=descriptors) as serving, contributing(serving):
        rate = Rate(serving)
        rate.measure("before", arrivals)
        files, memory_mb = serving.open_files(), serving.resident_mb()
        for kind in KINDS:
            strangers = itertools.cycle(itertools.islice(addresses(), addresses_used))
            with contextlib.ExitStack() as stack:
                for _ in range(connections):
                    with contextlib.suppress(OSError):  # it is sent away
                        stack.enter_context(kind(serving.port, next(strangers)))
                rate.measure(kind.__name__, arrivals)
                serving.check_well()
            until(lambda: serving.open_files() <= files + 4, f"the connections of {kind.__name__} are closed", GONE_S)
        rate.measure("after", arrivals)
        serving.check_well()
        after_mb = serving.settled_mb(memory_mb)
        return judge(
            {
                "arrivals_per_s": rate.figures,
                "lost": serving.lost(),
                "memory_mb": [round(memory_mb), round(after_mb)],
            },
            nobody_is_lost=not serving.lost(),
            arrivals_go_on=min(rate.figures.values()) > 0.2 * rate.figures["before"],
            memory_is_given_back=after_mb < 1.1 * memory_mb,
        )


def attack_from_one_address(serving: Serving, connections: int) -> dict[str, Any]:
    """One address holds few places, and each for a few seconds only."""
    opened = connect_many(serving.port, "127.9.9.9", connections)
    began = time.monotonic()
    open_count = until(lambda: (count := sum(map(is_open, opened))) <= FEW and count, "most are closed at once", AT_ONCE_S)
    until(lambda: not any(map(is_open, opened)), "all are closed", GONE_S)
    return {"held": open_count, "closed_after_s": round(time.monotonic() - began, 1)}


if __name__ == "__main__":
    run_alone(attack, connections=1000, addresses_used=20, descriptors=512, arrivals=500)
