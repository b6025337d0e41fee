"""`heloco serve`: a run on real machines. `heloco train --engine ray` is the same with machines of this one alone."""

import argparse
import contextlib
import signal
import socket
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from heloco.cli.flags import Parser, add_config_flags, given_fields
from heloco.errors import UserError

if TYPE_CHECKING:
    from heloco.engine.cluster.host import Door, Recipe
    from heloco.run import RunConfig

FAREWELL_S = 15.0
LINGER_S = 1.2
"""Whoever watches from elsewhere looks twice a second: the last lines must reach them."""
ON_PURPOSE = "stopped by "
PAGE = "heloco.cli.page:page_of"
EVERYWHERE = "0.0.0.0"


def add_serve_flags(made: Parser) -> None:
    made.add_argument("run", nargs="?", type=Path, metavar="RUN", help="a TOML file for a new run, or the folder of an old one")
    made.add_argument("--workers", metavar="N", default="0", help="machines to start on this one at once [0]")
    made.add_argument("--seats", metavar="N", help="how many workers the run has [as many as paces, or as --workers]")
    made.add_argument("--host", metavar="NAME", help="where to listen [0.0.0.0: everywhere; of an old run: where it did]")
    made.add_argument("--port", metavar="N", help="of the gateway; 0: any free one [8443; of an old run: the one it had]")
    made.add_argument("--name", metavar="HOST", action="append", default=[], help="how others reach this machine [its own name]")
    made.add_argument("--cert", metavar="FILE", default="", help="a certificate of your own (PEM); --key goes with it")
    made.add_argument("--key", metavar="FILE", default="")
    made.add_argument("--ray", metavar="{auto,off,ADDRESS}", default="auto", help="start Ray, leave it out, or join one [auto]")
    made.add_argument("--out", type=Path, metavar="DIR", help="a new run's folder [runs/METHOD-001, …]")
    add_config_flags(made, without=("workers",))


def serve(parsed: argparse.Namespace) -> int:
    from heloco.engine.cluster.host import Door

    local = whole(parsed.workers, "workers")
    before = (Door.kept(parsed.run) if parsed.run else None) or Door(EVERYWHERE)
    port = whole(parsed.port, "port") if parsed.port else before.port
    if port > 65535:
        raise UserError(f"port cannot be {port}: give a number from 0 to 65535.")
    host = parsed.host or before.host
    names = tuple(parsed.name) or (before.names if host == before.host else ()) or own_names(host)
    page = PAGE if page_can_be_shown() else ""
    cert, key = (str(Path(given).resolve()) if given else "" for given in (parsed.cert, parsed.key))
    door = Door(host, port, names, cert or before.cert, key or before.key, page)
    if parsed.ray in ("auto", "off"):  # otherwise it may be another machine that listens
        check_port(host, port)
    return carry_on(recipe_for(parsed, local, door), local, parsed.ray)


def own_names(host: str) -> tuple[str, ...]:
    """How others may call this machine: by its name, or by an address where it has none that means anything elsewhere."""
    if host not in (EVERYWHERE, "::"):
        return (host,)
    found = dict.fromkeys(name for name in (socket.getfqdn(), socket.gethostname()) if not name.startswith("localhost"))
    return tuple(found) or (outward_address(),)


def outward_address() -> str:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect(("192.0.2.1", 9))  # sends nothing: the system says which of its addresses it would use
        return str(asking.getsockname()[0])
    return "localhost"


def check_port(host: str, port: int) -> None:
    """Before a run is begun that could not be served."""
    from heloco.engine.cluster.gateway.server import listen

    listen(host, port).close()


def whole(text: str, name: str) -> int:
    if not text.isdecimal():
        raise UserError(f"{name} cannot be {text!r}: give a whole number ≥ 0.")
    return int(text)


def page_can_be_shown() -> bool:
    from importlib.util import find_spec

    return all(find_spec(part) is not None for part in ("plotly", "jinja2", "starlette"))


def recipe_for(parsed: argparse.Namespace, local: int, door: "Door | None") -> "Recipe":
    """A new run from a TOML file and flags, or the run in a folder with other [cluster] settings."""
    from heloco.engine.cluster.host import Recipe, recipe_of
    from heloco.run import RunConfig, RunFolder, make_next, resolve, with_fields
    from heloco.run.config import FIELDS, read_toml, to_toml

    flags = given_fields(parsed)
    if parsed.run is not None and parsed.run.is_dir():
        if RunFolder.open(parsed.run).meta().get("clock") != "real":
            raise UserError(f"{parsed.run} is a simulation: `heloco resume {parsed.run}` goes on with it.")
        for name in flags:
            if FIELDS[name] not in ("cluster", "data"):
                raise UserError(f"--{name.replace('_', '-')} cannot change in a run that has begun: leave it out.")
        changes = {name: value for name, value in flags.items() if FIELDS[name] == "cluster"}
        cluster = to_toml(with_fields(RunConfig(), changes)) if changes else ""
        return Recipe(str(parsed.run), "", cluster, flags.get("data"), door)
    values = (read_toml(parsed.run, overridden=flags) if parsed.run else {}) | flags
    seats = whole(parsed.seats, "seats") if parsed.seats else 0 if "paces" in values else local
    if seats:
        values |= {"paces": [1.0] * seats, "workers": 0}
    config = resolve(with_fields(RunConfig(), values))
    if parsed.out and config.data.task != "external":  # one that waits for its model may be started again: it looks itself
        RunFolder.check_free(parsed.out)
    return recipe_of(config, parsed.out or make_next(Path("runs"), config.outer.method), door=door)


def train_on_ray(config: "RunConfig", out: Path, logs: list[str]) -> int:
    """Real workers on this machine, as many as the run has."""
    from heloco.engine.cluster.host import recipe_of

    if logs:
        raise UserError("--log works with the simulation engine: leave it out, or leave out --engine ray.")
    return carry_on(recipe_of(config, out), len(config.workers.paces), "auto")


# ---- running


class Engine(Protocol):
    """What serves a run: in this process, or in Ray's."""

    address: str
    token: str
    news: str
    """What there is to tell about the token."""

    def status(self) -> dict[str, Any]: ...
    def stop(self, reason: str) -> None: ...
    def trouble(self) -> str:
        """What a local worker or the synchronizer said that ended badly, where nobody can go on without a person."""

    def close(self) -> None: ...


class HereEngine:
    """The service in this process, and its local workers in theirs, over the gateway."""

    def __init__(self, recipe: "Recipe", local: int) -> None:
        from heloco.cli.main import preparing
        from heloco.engine.cluster.host import Host, LocalWorkers

        with preparing() as progress:
            self.host = Host(recipe, progress)
        self.address, self.token, self.news = self.host.address, self.host.token, self.host.news
        reached = self.address.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")
        self.workers = LocalWorkers(local, reached, self.token, Path(recipe.folder)) if local else None

    def status(self) -> dict[str, Any]:
        return self.host.status()

    def stop(self, reason: str) -> None:
        self.host.stop(reason)

    def trouble(self) -> str:
        return self.workers.failed() if self.workers else ""

    def close(self) -> None:
        if self.workers:
            self.workers.end()
        self.host.close()


def engine_for(recipe: "Recipe", local: int, ray: str) -> Engine:
    from importlib.util import find_spec

    if ray == "off" or (ray == "auto" and find_spec("ray") is None and recipe.door is not None):
        return HereEngine(recipe, local)
    from heloco.engine.cluster.on_ray import RayEngine

    return RayEngine(recipe, workers=local, address=None if ray == "auto" else ray)


def carry_on(recipe: "Recipe", local: int, ray: str) -> int:
    """Serves until the run has ended or somebody ends it; says how."""
    from heloco.cli.serve_view import follow

    caught: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        caught.append(number)

    engine = engine_for(recipe, local, ray)  # until it stands, Ctrl-C ends it at once
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if (state := engine.status())["ended"] == "finished":
            print(f"{recipe.folder} is finished: all {state['planned']} arrivals are in.")
            return 0
        announce(engine, recipe, ray)
        ended = follow(engine, Path(recipe.folder), lambda: bool(caught))
        if caught:
            engine.stop(f"{ON_PURPOSE}{signal.Signals(caught[0]).name}")
        if caught or ended.startswith(ON_PURPOSE):
            print(how_to_go_on(recipe), flush=True)
        let_all_hear_of_it(engine)
        if caught:
            return 128 + caught[0]
    finally:
        engine.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    if ended == "finished":
        print(f"The run's folder: {recipe.folder}")
        return 0
    if ended.startswith(ON_PURPOSE):  # `heloco stop`
        return 0
    raise UserError(f"The run has ended: {ended}")


def how_to_go_on(recipe: "Recipe") -> str:
    if recipe.again() is recipe and recipe.config:
        return f"Stopped before a machine brought a model: the same command with --out {recipe.folder} starts again."
    return f"Stopped and saved. `heloco serve {recipe.folder}` goes on."


def let_all_hear_of_it(engine: Engine) -> None:
    """Machines come for the last model and leave; those that do not come are not waited for long."""
    now = time.monotonic()
    least, most = now + (LINGER_S if engine.address else 0.0), now + FAREWELL_S
    while (now := time.monotonic()) < least or (now < most and engine.status()["machines"]):
        time.sleep(0.1)


def announce(engine: Engine, recipe: "Recipe", ray: str) -> None:
    if not engine.address:
        return
    if engine.news:
        print(engine.news)
    shown = reachable(engine.address, recipe)
    if brought(recipe):
        print(f"In training scripts:  HELOCO_ADDRESS={shown} HELOCO_TOKEN={engine.token}", flush=True)
    else:
        print(f"On other machines:  heloco join {shown} --token {engine.token}", flush=True)
        if ray not in ("auto", "off"):
            print(f"On Ray's nodes:     heloco join ray:{ray.removeprefix('ray:')}", flush=True)
    if recipe.door and not recipe.door.page:
        print('Live page:          needs plotly and jinja2: pip install "heloco[report]"', flush=True)
    elif recipe.door:
        from heloco.engine.cluster.gateway.credentials import view_key

        print(f"Live page:          {shown}/page?key={view_key(engine.token)}", flush=True)


def brought(recipe: "Recipe") -> bool:
    """Whether the run trains what training scripts bring: then there is nothing for `heloco join` to train."""
    kept = Path(recipe.folder) / "config.toml"
    return 'task = "external"' in (recipe.config or (kept.read_text() if kept.exists() else ""))


def reachable(address: str, recipe: "Recipe") -> str:
    """The address as others may call it."""
    if recipe.door is None or not recipe.door.names:
        return address
    name = recipe.door.names[0]
    return f"https://{f'[{name}]' if ':' in name else name}:{address.rpartition(':')[2]}"
