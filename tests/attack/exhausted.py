"""The run's process runs out of descriptors or memory for a while. Requests are refused as busy, and then the run continues.

Alone: `python tests/attack/exhausted.py`; `--help` names its options.
"""

import http.client
import json
import resource
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from heloco.cluster.protocol.tokens import parse_token
from rig import Rate, Serving, check, connect, contributing, judge, run_alone, unchecked, until

DESCRIPTORS, MEMORY = resource.RLIMIT_NOFILE, resource.RLIMIT_DATA
NAMES = {DESCRIPTORS: "descriptors", MEMORY: "memory"}
MARGIN = {DESCRIPTORS: 0, MEMORY: 16 << 20}
"""What the process may still allocate: no descriptor, but memory for small objects and the bytes of a large message."""
ARRIVALS = 50
LARGE = b'{"name":"x","version":"0","layout":[' + b'["a","F32",[1,2,3,4,5]],' * 170_000 + b'["a","F32",[1]]]}'
"""A message that takes much memory to read."""


def in_use(serving: Serving, limit: int) -> int:
    process = Path(f"/proc/{serving.pid}")
    if limit == DESCRIPTORS:
        return max(int(entry.name) for entry in (process / "fd").iterdir()) + 1
    return int((process / "statm").read_text().split()[5]) * resource.getpagesize()


@contextmanager
def without_more(serving: Serving, limit: int) -> Iterator[None]:
    """Limits the process to what it uses now."""
    old_limit = resource.prlimit(serving.pid, limit)
    resource.prlimit(serving.pid, limit, (in_use(serving, limit) + MARGIN[limit], old_limit[1]))
    try:
        yield
    finally:
        resource.prlimit(serving.pid, limit, old_limit)


class Asking:
    """One connection with the token, which counts the answers."""

    def __init__(self, serving: Serving) -> None:
        self._connection = http.client.HTTPSConnection("127.0.0.1", serving.port, timeout=20, context=unchecked())
        self._secrets = {right: parse_token(serving.token_for(right)).secret for right in ("worker", "viewer")}
        self.answers: Counter[str] = Counter()

    def ask(self, method: str, path: str, body: bytes | None = None) -> str:
        answer = "no answer"
        with suppress(http.client.HTTPException, OSError):
            secret = self._secrets["viewer" if path.startswith("/v1/file") else "worker"]
            self._connection.request(method, path, body, {"authorization": f"Bearer {secret}"})
            response = self._connection.getresponse()
            content = response.read()
            code = json.loads(content).get("code", "") if b'"code"' in content[:20] else ""
            answer = f"{response.status} {code}".strip()
        if answer == "no answer":
            self._connection.close()
        self.answers[answer] += 1
        return answer


def ask_meanwhile(serving: Serving, limit: int) -> dict[str, int]:
    """Requests that need a descriptor or much memory, and some that need neither."""
    asking = Asking(serving)
    check(asking.ask("GET", "/v1/describe") == "200", "the run does not answer")
    with without_more(serving, limit):
        waiting = connect(serving.port, "127.9.0.1", 60.0)
        for _ in range(5):
            if limit == DESCRIPTORS:
                asking.ask("GET", "/v1/file?name=config.toml&offset=0")
            else:
                asking.ask("POST", "/v1/join", LARGE)
            check(asking.ask("GET", "/v1/clock") == "200", f"a request that needs nothing was refused: {asking.answers}")
    until(lambda: asking.ask("GET", "/v1/file?name=config.toml&offset=0") == "200", "files can be read again", 20.0)
    if limit == MEMORY:
        waiting.close()
        waiting = connect(serving.port, "127.9.0.1")
    with unchecked().wrap_socket(waiting) as greeted:  # without descriptors, it could not be accepted before
        greeted.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        check(greeted.recv(4096).startswith(b"HTTP/1.1 401"), "connections are not accepted again")
    serving.check_well()
    wrong = [answer for answer in asking.answers if answer.startswith("5") and answer != "503 busy"]
    check(not wrong and asking.answers["503 busy"], f"{NAMES[limit]} ran out: {asking.answers}")
    return dict(asking.answers)


def attack(folder: Path, seconds: float, times: int) -> dict[str, Any]:
    """Running out of something degrades a run and does not end it."""
    with Serving(folder) as serving, contributing(serving):
        rate, answers = Rate(serving), {}
        rate.measure("before", ARRIVALS)
        for number in range(times):
            for limit, name in NAMES.items():
                answers[f"{name} {number}"] = ask_meanwhile(serving, limit)
                with without_more(serving, limit), rate.measured(f"without {name} {number}"):
                    time.sleep(seconds)
                rate.measure(f"with {name} again {number}", ARRIVALS)
        rate.measure("after", ARRIVALS)
        serving.check_well()
        figures = {"arrivals_per_s": rate.figures, "answers": answers, "lost": serving.lost()}
        return judge(figures, it_recovers=rate.figures["after"] > 0.2 * rate.figures["before"])


if __name__ == "__main__":
    run_alone(attack, seconds=10.0, times=3)
