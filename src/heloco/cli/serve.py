"""`heloco serve`: a run on real machines. `heloco train --engine ray` does the same with workers on this machine alone."""

import argparse
import contextlib
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from heloco.cli.announcement import announce, how_to_go_on
from heloco.cli.flags import Parser, add_config_flags, given_fields, warn_of_rates
from heloco.cli.report_command import report_command
from heloco.errors import RunStopped, UserError

if TYPE_CHECKING:
    from heloco.cluster.protocol.messages import Right, Status
    from heloco.cluster.server.process import ListenConfig, ServeSpec
    from heloco.records.serving import ServingRecord
    from heloco.run import RunConfig
    from heloco.run.config import Settings

FAREWELL_S = 15.0
SILENT_BEATS = 3  # a machine that is silent for longer will not hear of the end
LINGER_S = 1.2
"""Seconds to stay up after the end. `heloco watch` elsewhere looks twice a second, and must get the last lines."""
RELEASE_S = 5.0
"""How long a run that is served again waits for its port. If `heloco serve` is killed, its child ends a moment after it."""
PAGE = "heloco.cli.page:page_of"
EVERYWHERE = "0.0.0.0"


def add_serve_flags(parser: Parser) -> None:
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="a TOML file for a new run, or the folder of an old one")
    parser.add_argument("--workers", metavar="N", help="machines to start on this one at once [0; of an old run: as before]")
    parser.add_argument("--seats", metavar="N", help="how many workers the run has [as the config says, or as --workers; 5]")
    parser.add_argument("--host", metavar="NAME", help="where to listen [0.0.0.0: everywhere; of an old run: where it did]")
    parser.add_argument("--port", metavar="N", help="of the gateway; 0: any free one [8443; of an old run: the one it had]")
    parser.add_argument(
        "--name", metavar="HOST", action="append", default=[], help="how others reach this machine [its own name]"
    )
    parser.add_argument("--cert", metavar="FILE", default="", help="a certificate of your own (PEM); --key goes with it")
    parser.add_argument("--key", metavar="FILE", default="")
    parser.add_argument(
        "--ray", metavar="{auto,off,ADDRESS}", help="start Ray, leave it out, or join one [auto; of an old run: as before]"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="a new run's folder [runs/METHOD-001, …]")
    add_config_flags(parser, without=("workers",), is_real=True)


def serve(arguments: argparse.Namespace) -> int:
    """`heloco serve`: serves a new run or an old one until it ends or a signal comes, and returns the exit code."""
    from heloco.cli.warm_restart import CAN_RESTART
    from heloco.cluster.server.process import ListenConfig
    from heloco.records.serving import ServingRecord

    is_old_run = arguments.run is not None and arguments.run.is_dir()
    served_before = ServingRecord.load(arguments.run) if is_old_run else ServingRecord()
    local = parse_whole_number(arguments.workers, "workers") if arguments.workers else served_before.workers
    ray = arguments.ray or served_before.ray
    previous = (ListenConfig.load(arguments.run) if arguments.run else None) or ListenConfig(EVERYWHERE)
    port = parse_whole_number(arguments.port, "port") if arguments.port else previous.port
    if port > 65535:
        raise UserError(f"port cannot be {port}: give a number from 0 to 65535.")
    host = arguments.host or previous.host
    names = tuple(arguments.name) or (previous.names if host == previous.host else ()) or own_names(host)
    page = PAGE if page_can_be_shown() else ""
    cert, key = (str(Path(path).resolve()) if path else "" for path in (arguments.cert, arguments.key))
    listen = ListenConfig(host, port, names, cert or previous.cert, key or previous.key, page)
    if ray in ("auto", "off"):  # otherwise it may be another machine that listens
        check_port(host, port, wait_s=RELEASE_S if is_old_run else 0.0)
    spec = old_spec(arguments, served_before, listen) if is_old_run else new_spec(arguments, local, listen)
    if arguments.is_program and CAN_RESTART and serves_here(spec, ray):
        from heloco.cli.warm_serve import serve_in_children

        return serve_in_children(spec, local)
    return carry_on(spec, local, ray)


def own_names(host: str) -> tuple[str, ...]:
    """Names under which others reach this machine, or its address if it has no name that is valid elsewhere."""
    if host not in (EVERYWHERE, "::"):
        return (host,)
    names = dict.fromkeys(name for name in (socket.getfqdn(), socket.gethostname()) if not name.startswith("localhost"))
    return tuple(names) or (outward_address(),)


def outward_address() -> str:
    """The address from which this machine reaches others; localhost if it has no network."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing, but shows which local address the system would use
        return str(probe.getsockname()[0])
    return "localhost"


def check_port(host: str, port: int, wait_s: float = 0.0) -> None:
    """Raises UserError before a run is begun that could not be served. A port that is taken may become free within `wait_s`."""
    from heloco.cluster.gateway.https_server import listen

    until = time.monotonic() + wait_s
    while True:
        try:
            return listen(host, port).close()
        except UserError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def parse_whole_number(text: str, name: str) -> int:
    """The value of a flag that counts something. Raises UserError, with the flag's name, for anything but digits."""
    if not text.isdecimal():
        raise UserError(f"{name} cannot be {text!r}: give a whole number ≥ 0.")
    return int(text)


def page_can_be_shown() -> bool:
    """Whether the packages that the live page needs are installed."""
    from importlib.util import find_spec

    return all(find_spec(part) is not None for part in ("plotly", "jinja2", "starlette"))


def old_spec(arguments: argparse.Namespace, served_before: "ServingRecord", listen: "ListenConfig | None") -> "ServeSpec":
    """The run in a folder, as it was served before, with the text and the [cluster] settings that flags give."""
    from heloco.cluster.server.process import ServeSpec
    from heloco.run import RunConfig, RunFolder, with_fields
    from heloco.run.settings import parse_toml, section_to_toml, setting_sections

    if not RunFolder.open(arguments.run).facts().is_real:
        raise UserError(f"{arguments.run} is a simulation: `heloco resume {arguments.run}` goes on with it.")
    flags, sections = given_fields(arguments), setting_sections()
    for name in flags:
        if sections[name] not in ("cluster", "input"):
            raise UserError(f"--{name.replace('_', '-')} cannot change in a run that has begun: leave it out.")
    changes = parse_toml(served_before.cluster, "the settings of the last time")
    changes |= {name: value for name, value in flags.items() if sections[name] == "cluster"}
    cluster = section_to_toml(with_fields(RunConfig(), changes), "cluster", changes)
    data = str(flags["data"]) if "data" in flags else served_before.data
    if data is not None and Path(data).expanduser().exists():
        data = str(Path(data).expanduser().resolve())  # the next `heloco serve` may be called from another folder
    return ServeSpec(str(arguments.run), "", cluster, data, listen)


def new_spec(arguments: argparse.Namespace, local: int, listen: "ListenConfig | None") -> "ServeSpec":
    """A new run from a TOML file and flags."""
    from heloco.cluster.server.open_run import check_servable
    from heloco.cluster.server.process import spec_of
    from heloco.run import RunConfig, RunFolder, make_next, resolve, with_fields
    from heloco.run.settings import read_toml, with_recipe

    flags = given_fields(arguments)
    values = (read_toml(arguments.run, overridden=flags) if arguments.run else {}) | flags
    seats = parse_whole_number(arguments.seats, "seats") if arguments.seats else 0
    values = with_recipe("best", values, is_real=True)
    config = resolve(with_fields(RunConfig(), with_seats(values, seats or local)))
    check_servable(config)
    warn_of_rates(config)
    if arguments.out and config.input.task != "external":  # that one checks the folder itself
        RunFolder.check_free(arguments.out)
    return spec_of(config, arguments.out or make_next(Path("runs"), config.outer.method), listen=listen)


def with_seats(values: "Settings", count: int) -> "Settings":
    """The values of a run on real machines, which have their own paces: only the number of workers is set.

    `count`: the number of workers if the config does not set it; 0: as many as in a simulation."""
    if values.get("execution", "auto") != "auto":
        raise UserError("execution is a setting of simulations, and real machines compute a round at a time: leave it out.")
    if "paces" in values:
        return values  # refused later unless all are 1
    from heloco.run import RunConfig
    from heloco.run.values import convert

    workers = convert("workers", values.get("workers") or count or len(RunConfig().rounds.paces), int)
    return {**values, "paces": [1.0] * workers, "workers": 0}


def train_on_ray(config: "RunConfig", out: Path, logs: list[str]) -> int:
    """Serves a run to real workers on this machine, one for each seat."""
    from heloco.cluster.server.process import spec_of

    if logs:
        raise UserError("--log works with the simulation engine: leave it out, or leave out --engine ray.")
    return carry_on(spec_of(config, out), len(config.rounds.paces), "auto")


# ---- running


class Engine(Protocol):
    """Serves a run, in this process or in Ray's processes."""

    address: str
    notices: list[str]
    """Sentences for the person who serves the run."""

    def token(self, right: "Right") -> str:
        """A valid token with this right, in the form that is pasted; empty without a gateway."""

    def status(self) -> "Status":
        """Where the run stands, with its machines, pauses and ending."""

    def stop(self, reason: str) -> None:
        """Saves the run and ends it for all machines, which receive `reason`."""

    def suspend(self, reason: str) -> None:
        """Saves the run, to be served again: machines keep their rounds and wait."""

    def trouble(self) -> str | None:
        """The error of a local worker or of the synchronizer that needs a person; None if there is none."""

    def close(self) -> None:
        """Stops serving, and ends the local workers."""


class SynchronizerFailed(RunStopped):
    """The synchronizer could not go on; what was acknowledged is safe, and another start may help."""


@dataclass(frozen=True)
class ServingChild:
    """What the child of a `heloco serve` that starts it again has to know."""

    is_restart: bool
    lifeline: int | None
    """The end of a pipe for local workers to read from: it is closed when the parent ends."""


class HereEngine:
    """The service in this process, and its local workers in their own processes, connected through the gateway."""

    def __init__(self, spec: "ServeSpec", local: int, child: ServingChild | None = None) -> None:
        from heloco.cli.main import show_preparation
        from heloco.cluster.server.process import LocalWorkers, RunHost

        with show_preparation() as progress:
            self.host = RunHost.open(spec, progress)
        self.address, self.notices = self.host.address, self.host.service.notices
        local_address = self.address.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")
        self.workers: LocalWorkers | None = None
        self._is_child = child is not None
        if local:
            lifeline = child.lifeline if child else None
            self.workers = LocalWorkers(local, local_address, self.token("worker"), Path(spec.folder), lifeline=lifeline)

    def token(self, right: "Right") -> str:
        return self.host.token(right)

    def status(self) -> "Status":
        return self.host.status()

    def stop(self, reason: str) -> None:
        self.host.stop(reason)

    def suspend(self, reason: str) -> None:
        self.host.suspend(reason)

    def trouble(self) -> str | None:
        return self.workers.failure() if self.workers else None

    def close(self) -> None:
        goes_on = self._is_child and self.host.service.state.has_failed
        if self.workers and not goes_on:  # else the next child takes them over
            self.workers.end()
        self.host.close()


def serves_here(spec: "ServeSpec", ray: str) -> bool:
    """Whether the run is served by this process, without Ray."""
    from importlib.util import find_spec

    return ray == "off" or (ray == "auto" and find_spec("ray") is None and spec.listen is not None)


def engine_for(spec: "ServeSpec", local: int, ray: str, child: "ServingChild | None" = None) -> Engine:
    """Begins to serve the run with `local` workers: in this process, or with Ray if it is installed or its address is given."""
    if serves_here(spec, ray):
        return HereEngine(spec, local, child)
    print("Starting Ray …" if ray == "auto" else f"Connecting to Ray at {ray} …", flush=True)
    from heloco.cluster.ray import RaySupervisor

    return RaySupervisor(spec, workers=local, address=None if ray == "auto" else ray)


def carry_on(spec: "ServeSpec", local: int, ray: str, child: "ServingChild | None" = None) -> int:
    """Serves until the run has ended or a signal comes. Prints how it ended, and returns the exit code. `child`: set in a child
    that `heloco serve` restarts."""
    from heloco.cli.serve_view import follow

    signals: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        signals.append(number)

    engine = engine_for(spec, local, ray, child)  # until it is open, Ctrl-C ends the process at once
    old_handlers = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for notice in engine.notices:
            print(notice, flush=True)
        state = engine.status()
        if state.ended is not None and state.ended.kind == "finished":
            print(f"{spec.folder} is finished: all {state.arrival_goal} arrivals are in.")
            return 0
        if child is not None and child.is_restart:
            print(f"The run goes on after arrival {state.arrivals}.", flush=True)
        else:
            remember(spec, local, ray)
            announce(engine, spec, ray)
        end = follow(engine, Path(spec.folder), lambda: bool(signals))
        if signals and end is None:
            engine.suspend(f"its `heloco serve` was ended by {signal.Signals(signals[0]).name}")
        if end is None or end.kind in ("stopped", "suspended"):
            print(how_to_go_on(spec, is_stopped=end is not None and end.kind == "stopped"), flush=True)
        if end is None or end.kind != "failed":
            let_all_hear_of_it(engine)
        if signals or end is None:
            return 128 + signals[0]
    finally:
        engine.close()
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
    if end.kind == "failed":
        raise SynchronizerFailed(f"The run has ended: {end.text}")
    if end.kind == "gave-up":
        raise UserError(f"The run has ended: {end.text}")
    if end.kind == "finished":
        print(f"To look at it: {report_command(Path(spec.folder))}")
        print(f"The run's folder: {spec.folder}")
    return 0


def remember(spec: "ServeSpec", local: int, ray: str) -> None:
    """Records how the run is served, for the next time."""
    from heloco.records.serving import ServingRecord

    engine = "off" if serves_here(spec, ray) else ray  # Ray may have been installed by the next time
    with contextlib.suppress(OSError):  # a full disk: the run can be served all the same
        ServingRecord(workers=local, ray=engine, data=spec.data, cluster=spec.cluster).save(Path(spec.folder))


def let_all_hear_of_it(engine: Engine) -> None:
    """Waits a while, so that machines that are still there hear of the end. If it is for good, they can fetch the final model."""
    began = time.monotonic()
    while (passed_s := time.monotonic() - began) < FAREWELL_S:
        if passed_s >= (LINGER_S if engine.address else 0.0) and not somebody_is_to_hear(engine.status(), passed_s):
            return
        time.sleep(0.1)


def somebody_is_to_hear(status: "Status", passed_s: float) -> bool:
    """Whether a machine is there that has not heard of the end, which was `passed_s` ago. One that has leaves. If the run is
    suspended it stays, and has heard of it if it gave a sign of life since then."""
    is_suspended = status.ended is not None and status.ended.kind == "suspended"
    has_heard_s = passed_s if is_suspended else -1.0
    return any(not m.is_away and has_heard_s < m.silent_s < SILENT_BEATS * status.beat_s for m in status.machines)
