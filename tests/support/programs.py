"""`heloco serve`, `join` and the others as processes."""

import http.client
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.fault_places import children_of
from support.nursery import ForkedProcess, Nursery
from support.runs import TINY_MODEL, Done, heloco, tape

LIMIT_S = 90.0
"""Nothing here takes so long, on a machine that does much else besides."""


SMALL = (
    *TINY_MODEL, "--batch-size", "2", "--lr", "0.003", "--inner-steps", "3", "--eval-every", "10", "--checkpoint-every", "15",
    "--device", "cpu",
)  # fmt: skip


HERE = ("--ray", "off", "--host", "127.0.0.1")


def wait_until(condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    until = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < until, f"after {limit_s:g} s still not: {what}"
        time.sleep(0.01)
    return value


@dataclass(frozen=True)
class Program:
    """A process whose words go to files."""

    process: "subprocess.Popen[bytes] | ForkedProcess"
    out: Path
    err: Path

    def match_output(self, pattern: str) -> re.Match[str]:
        """What it printed, once it has."""

        def look() -> re.Match[str] | None:
            over = self.process.poll() is not None
            match = re.search(pattern, self.out.read_text())
            assert match or not over, (pattern, self.out.read_text(), self.err.read_text())
            return match

        match: re.Match[str] = wait_until(look, f"{pattern!r} in {self.out}")
        return match

    def end(self) -> Done:
        code = self.process.wait(timeout=LIMIT_S)
        return Done(code, self.out.read_text(), self.err.read_text(), self.process.pid)

    def signal(self, number: int) -> None:
        if number in (signal.SIGSTOP, signal.SIGCONT):  # a child does the work
            for child in children_of(self.process.pid):
                os.kill(child, number)
        self.process.send_signal(number)

    def clear_away(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.terminate()  # `serve` ends its local workers
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@dataclass
class Served:
    """A run that is served by a process of its own."""

    program: Program
    folder: Path
    address: str
    token: str
    """A worker's."""
    viewer: str
    key: str

    @property
    def port(self) -> str:
        return self.address.rpartition(":")[2]

    def arrivals(self) -> int:
        path = self.folder / "tape.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def ask(self, command: str, *more: str) -> Done:
        """As whoever may do it: over the address, or on the machine itself."""
        if command in ("stop", "pause", "unpause", "tokens"):
            return heloco(command, self.folder, *more)
        token = self.viewer if command in ("status", "watch") else self.token
        return heloco(command, self.address, "--token", token, *more)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.ask("status", "--json").out)
        return status


class Programs:
    def __init__(self, folder: Path, nursery: Nursery) -> None:
        self.folder, self.nursery = folder, nursery
        self.programs: list[Program] = []

    def start(self, name: str, command: list[str], **environment: str) -> Program:
        out, err = self._files(name)
        with out.open("wb") as out_file, err.open("wb") as err_file:
            process = subprocess.Popen(
                command, env=_clean(environment), stdin=subprocess.DEVNULL, stdout=out_file, stderr=err_file
            )
        return self._keep(Program(process, out, err))

    def heloco(self, *arguments: str | Path, **environment: str) -> Program:
        """Forked, unless it needs a library that is loaded before everything else."""
        if "LD_PRELOAD" in os.environ:
            return self.start(str(arguments[0]), [sys.executable, "-m", "heloco.cli", *map(str, arguments)], **environment)
        out, err = self._files(str(arguments[0]))
        process = self.nursery.start(*arguments, out=out, err=err, environment=_clean(environment), cwd=Path.cwd())
        return self._keep(Program(process, out, err))

    def _files(self, name: str) -> tuple[Path, Path]:
        out, err = (self.folder / f"{len(self.programs)}-{name}.{ending}" for ending in ("out", "err"))
        out.touch()
        err.touch()
        return out, err

    def _keep(self, program: Program) -> Program:
        self.programs.append(program)
        return program

    def serve(self, run: Path, *settings: str, port: str = "0", config: Path | None = None) -> Served:
        """A new run, or the one in the folder."""
        where = [run] if (run / "config.toml").exists() else [*([config] if config else []), "--out", run]
        place = (*HERE, "--port", port) if port else ("--ray", "off")
        program = self.heloco("serve", *where, *settings, *place)
        viewer, address = program.match_output(r"HELOCO_TOKEN=(heloco-viewer\S+) heloco status (https://\S+)\n").groups()
        worker = program.match_output(r"HELOCO_TOKEN=(heloco-worker\S+)")[1]
        return Served(program, run, address, worker, viewer, program.match_output(r"/page\?key=(\S+)\n")[1])

    def join(self, served: Served, *more: str) -> Program:
        return self.heloco("join", served.address, *more, HELOCO_TOKEN=served.token)


def _clean(environment: dict[str, str]) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if name not in ("HELOCO_TOKEN", "HELOCO_ADDRESS")}
    return ours | {"OMP_NUM_THREADS": "1"} | environment


def assert_whole(folder: Path, arrivals: int) -> None:
    """Every arrival once, nothing of a round twice, and the journal gives the same again."""
    lines = tape(folder)
    assert [line["arrival"] for line in lines] == list(range(1, arrivals + 1))
    rounds = [(line["worker"], line["round"]) for line in lines]
    assert len(set(rounds)) == len(rounds)
    result = heloco("replay", folder)
    assert result.code == 0 and "All are the same, to the bit." in result.out, (result.out, result.err)


def get(served: Served, path: str) -> tuple[int, str]:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # as a person who clicks the warning away
    connection = http.client.HTTPSConnection("127.0.0.1", int(served.port), context=context, timeout=20)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()
