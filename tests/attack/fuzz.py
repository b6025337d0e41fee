"""Requests derived from real traffic, changed at random, to every endpoint. None may be answered with 5xx (but 503), leave a
traceback in the log, hang, or leave memory behind.

Alone: `python tests/attack/fuzz.py --requests 50000`; `--help` names its options.
"""

import contextlib
import itertools
import random
import socket
import ssl
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from heloco.cluster.gateway.app import app
from heloco.cluster.gateway.https_link import HttpsLink
from heloco.cluster.protocol.link import LinkDown
from heloco.cluster.protocol.messages import Right, Ticket, Wait
from heloco.cluster.protocol.refusals import Refused
from heloco.cluster.protocol.tokens import parse_token
from heloco.cluster.server.open_run import external_run
from heloco.cluster.server.process import ListenConfig, RunHost
from heloco.run import RunConfig, resolve, with_fields
from heloco.wire.layout import Layout
from mutations import Mutator
from recorder import Reading, Recorder, Request
from rig import REPORT, Failed, Serving, addresses, check, connect, judge, run_alone, unchecked, until

EXTERNAL = ("--task", "external", "--arrivals", "1000000", "--inner-steps", "2", "--device", "cpu", "--beat-s", "0.5")
MODEL = {"parameter.0": torch.linspace(-1, 1, 15).view(5, 3), "parameter.1": torch.zeros(4), "buffer.0": torch.zeros(3)}
NAMES = ["weight", "bias", "mean"]
ENDING = ("/v1/stop", "/v1/suspend")
"""Requests that would end a run. They are recorded but not forwarded, and nearly always mutated so that they are invalid."""
HANG_S = 5.0
REFRESH = 250
"""After this many requests the honest traffic is recorded again, so that requests are about rounds and machines that exist."""
WITHOUT_MODEL = 0.1
"""Share of the requests that are sent before the run has its model."""


# ---- honest traffic


class Session:
    """A machine, a viewer and an administrator, who use every endpoint there is, through the recorder."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.recorder = Recorder(serving.port, serving.folder / "credentials", ENDING)
        self.link, self.viewer, self.admin = self._link("worker"), self._link("viewer"), self._link("admin")
        self.layout, self.ticket = Layout.from_tensors(MODEL), Ticket(machine="nobody", secret="0" * 43)
        self.endpoints = endpoints(serving.folder.parent)

    def _link(self, right: Right) -> HttpsLink:
        return HttpsLink(f"https://127.0.0.1:{self.recorder.port}", self.serving.token_for(right))

    def _join(self, name: str) -> Ticket:
        return self.link.join(name, returning=None, layout=self.layout).ticket

    def bring_model(self, *, is_complete: bool) -> None:
        """Sends the model. Unless `is_complete`, the last request is left out, so that the run still waits for its model."""
        bringer = self._join("bringer")
        self.recorder.withheld_paths |= {"/v1/model/commit"}
        if is_complete:
            self.recorder.withheld_paths -= {"/v1/model/commit"}
        with contextlib.suppress(LinkDown, Refused):
            self.link.send_model(bringer, self.layout, MODEL, NAMES)
        self.link.leave(bringer, "its work is done")

    def work(self) -> None:
        """Rounds: one that is handed in, one that is given back, one that stays under way."""
        with contextlib.suppress(Refused):
            self.link.leave(self.ticket, "another takes its place")
        join_answer = self.link.join("worker", returning=None, layout=self.layout)
        self.ticket = ticket = join_answer.ticket
        contribution = Layout(join_answer.contribution_layout or ())
        delta = {name: torch.full(shape, 1e-3) for name, _, shape in contribution.entries}
        for ending in ("hand in", "give back", "keep"):
            answer = self.link.next_round(ticket, 0.0)
            if isinstance(answer, Wait):
                break
            self.link.fetch(ticket, answer.key, self.layout, answer.start_digest)
            self.link.beat(ticket, 1)
            if ending == "hand in":
                self.link.hand_in(ticket, answer.key, contribution, delta, REPORT)
            elif ending == "give back":
                self.link.abandon(ticket, "no reason")
        self.link.leave(self._join("guest"), "no reason")

    def rule(self) -> None:
        """Makes all requests of an administrator, and leaves the run usable."""
        self.admin.pause("a look at it")
        self.admin.evict(self._join("unwanted").machine, "no reason")
        self.admin.unpause()
        token = self.admin.new_token("worker", "for a while")
        self.admin.tokens()
        self.admin.revoke_token(token.id)

    def look(self) -> None:
        self.link.describe()
        self.viewer.status()
        self.viewer.read("tape.jsonl", 0)
        self.link.clock()
        self.link.probe_down(1000)
        self.link.probe_up(1000)
        for end in (self.admin.stop, self.admin.suspend):
            with contextlib.suppress(LinkDown):
                end("it is held back")
        key = parse_token(self.serving.token_for("viewer")).secret
        for path in (f"/page?key={key}", f"/page/?key={key}", f"/page/events?seen=-1&key={key}"):
            with unchecked().wrap_socket(socket.create_connection(("127.0.0.1", self.recorder.port), timeout=20)) as browser:
                browser.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\ncookie: heloco-view={key}\r\n\r\n".encode())
                browser.recv(1000)

    def requests(self) -> dict[tuple[str, str], list[Request]]:
        """The recorded requests, and similar ones for endpoints that were not used."""
        recorded = dict(self.recorder.requests)
        with_body = [request for group in recorded.values() for request in group if request.body]
        for number, kind in enumerate(sorted(self.endpoints - recorded.keys())):
            example = with_body[number % len(with_body)]
            recorded[kind] = [Request(*kind, query="a=1", headers=example.headers, body=example.body)]
        return recorded

    def close(self) -> None:
        for link in (self.link, self.viewer, self.admin):
            link.close()
        self.recorder.close()


def endpoints(folder: Path) -> set[tuple[str, str]]:
    """Methods and paths, as the gateway itself has them."""
    values = {"task": "external", "paces": [1.0], "arrivals": 1, "inner_steps": 1, "device": "cpu"}
    service = external_run(resolve(with_fields(RunConfig(), values)), folder / "endpoints")
    host = RunHost(service, ListenConfig("127.0.0.1", 0, ("localhost",)))
    application = app(host)
    host.close()
    return {(method, route.path) for route in application.routes for method in getattr(route, "methods", None) or ()}


# ---- the other side


class Sender:
    """Sends bytes over a connection for as long as the gateway keeps it, from an address that changes with the connection."""

    def __init__(self, port: int, statuses: Counter[int]) -> None:
        self.statuses = statuses
        self._port, self._sources, self._context = port, itertools.cycle(itertools.islice(addresses(), 500)), unchecked()
        self._connection: ssl.SSLSocket | None = None

    def send(self, packets: list[bytes]) -> None:
        """Sends a request. If the gateway has to answer it, it must do so soon."""
        reading = Reading()
        for packet in packets:
            reading.feed(packet)
        must_answer = bool(reading.complete) or reading.is_broken
        for is_first_try in (True, False):
            connection = self._connection or self._connected()
            try:
                for packet in packets:
                    connection.sendall(packet)
                has_body = not (reading.complete and reading.complete[0].method == "HEAD")
                status, body, keeps = self._answer(connection, has_body=has_body) if must_answer else (0, b"", False)
                break
            except (ConnectionError, ssl.SSLError, EOFError) as error:
                self.drop()
                if not is_first_try:
                    check(reading.is_broken or len(reading.complete) > 1, f"no answer ({error!r}) to {packets!r}")
                    return
            except TimeoutError:
                raise Failed(f"no answer within {HANG_S:g} s to {packets!r}") from None
        self.statuses[status] += 1
        check(status < 500 or (status == 503 and (not body or b"again" in body)), f"{status} {body!r} to {packets!r}")
        if not keeps or len(reading.complete) != 1:
            self.drop()

    def _connected(self) -> ssl.SSLSocket:
        plain = connect(self._port, next(self._sources), HANG_S)
        self._connection = self._context.wrap_socket(plain)
        return self._connection

    def _answer(self, connection: ssl.SSLSocket, *, has_body: bool) -> tuple[int, bytes, bool]:
        """The status, the body, and whether the connection can be used again."""
        content = b""
        while b"\r\n\r\n" not in content:
            if not (piece := connection.recv(1 << 16)):
                raise EOFError(content)
            content += piece
            if content.startswith(b"HTTP/1.1 100"):
                content = content.partition(b"\r\n\r\n")[2]
        head, _, body = content.partition(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        length = [int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:")]
        status = int(lines[0].split()[1])
        if not has_body or not length or length[0] > 1 << 16:
            return status, body, False
        while len(body) < length[0] and (piece := connection.recv(1 << 16)):
            body += piece
        return status, body, len(body) == length[0] and b"connection: close" not in lines

    def drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Fuzz:
    """Fuzzes one server after the other: if a request has ended the run or revoked the token, a new one is started."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.mutator, self.random = folder, Mutator(seed), random.Random(seed)
        self.servers, self.statuses, self.kinds = 0, Counter[int](), Counter[str]()
        self._baseline, self.memory = 0.0, list[tuple[float, float]]()

    def run(self, requests: int) -> None:
        remaining, early = requests, round(requests * WITHOUT_MODEL)
        while remaining > 0:
            with self._serving() as (serving, session):
                remaining -= self._fuzz(serving, session, early if remaining == requests else 0, with_model=False)
                if not self._has_ended(session):
                    session.bring_model(is_complete=True)
                    remaining -= self._fuzz(serving, session, remaining, with_model=True)
                self._check_end(serving, session)

    @contextlib.contextmanager
    def _serving(self) -> Iterator[tuple[Serving, Session]]:
        self.servers += 1
        with Serving(self.folder / f"{self.servers}", settings=EXTERNAL, workers=3) as serving:
            session = Session(serving)
            session.link.describe()
            session.bring_model(is_complete=False)
            session.look()
            try:
                yield serving, session
            finally:
                session.close()

    def _fuzz(self, serving: Serving, session: Session, requests: int, *, with_model: bool) -> int:
        """How many were sent before the run ended."""
        sender = Sender(serving.port, self.statuses)
        for number in range(requests):
            if number % REFRESH == 0:
                try:
                    session.rule()
                    if with_model:
                        session.work()
                    session.look()
                except (Refused, LinkDown, Failed, OSError):  # the run was ended, or the token was revoked
                    if self._has_ended(session):
                        return number
                seeds = session.requests()
                if with_model and number == 0:  # before its first round a run has not loaded all it needs
                    self._baseline = serving.resident_mb()
            kind = self.random.choice(sorted(seeds))
            text = self.mutator.mutate(self.random.choice(seeds[kind]), must_break=kind[1] in ENDING)
            self.kinds[" ".join(kind)] += 1
            try:
                sender.send(self.mutator.packets(text))
            except ConnectionRefusedError:  # the run was ended a while ago, and its process with it
                return number
        sender.drop()
        return requests

    @staticmethod
    def _has_ended(session: Session) -> bool:
        try:
            return session.link.describe().ended is not None
        except Exception:
            return True

    def _check_end(self, serving: Serving, session: Session) -> None:
        if self._has_ended(session):  # by a request that was valid after all: then it ends as it should
            until(lambda: serving.process.poll() is not None, "the process of the run ends", 60.0)
            check(serving.process.returncode in (0, 2), f"it ended with {serving.process.returncode}: {serving.log()[-3000:]}")
            serving.check_no_traceback()
            return
        serving.check_well()
        self.memory.append((round(self._baseline), round(serving.settled_mb(self._baseline))))


def attack(folder: Path, requests: int, seed: int) -> dict[str, Any]:
    """Whatever is sent, the gateway answers, stays small, and goes on."""
    fuzz, began = Fuzz(folder, seed), time.monotonic()
    fuzz.run(requests)
    figures = {
        "requests": sum(fuzz.kinds.values()), "seconds": round(time.monotonic() - began), "servers": fuzz.servers,
        "statuses": dict(sorted(fuzz.statuses.items())), "endpoints": len(fuzz.kinds), "memory_mb": fuzz.memory,
    }  # fmt: skip
    return judge(figures, memory_is_given_back=all(mb_after < 1.1 * mb_before for mb_before, mb_after in fuzz.memory))


if __name__ == "__main__":
    run_alone(attack, requests=50_000, seed=0)
