"""A run's service with all that serves it, in one process: time, and the gateway. Ray's actor has one, `heloco serve` may too."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from heloco.engine.build import build_task
from heloco.engine.cluster.memory import give_memory_back
from heloco.engine.cluster.service import Service
from heloco.engine.cluster.serving import Housekeeper, external_run, new_run, old_run
from heloco.errors import UserError
from heloco.run import RunConfig, RunFolder, resolve, with_fields
from heloco.run.config import FIELDS, parse_toml, to_toml
from heloco.run.disk import write_atomically
from heloco.run.folder import CONFIG

CREDENTIALS, DOOR = "credentials", "door.json"


@dataclass(frozen=True)
class Door:
    """Where the gateway listens, and by which names machines may call it."""

    host: str = "127.0.0.1"
    port: int = 8443
    names: tuple[str, ...] = ()
    cert: str = ""
    """A certificate of one's own, with its key; empty: one is made."""
    key: str = ""
    page: str = ""
    """"module:function" that makes the live page of a run's folder."""

    def keep(self, folder: Path) -> None:
        """So that machines find the run where it was, when it is served again."""
        about = {name: value for name, value in asdict(self).items() if name != "page"}
        write_atomically(folder / CREDENTIALS / DOOR, json.dumps(about).encode())

    @classmethod
    def kept(cls, folder: Path) -> "Door | None":
        """Where the run in this folder was served last."""
        try:
            found = json.loads((folder / CREDENTIALS / DOOR).read_text())
            return cls(**{**found, "names": tuple(found["names"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None


@dataclass(frozen=True)
class Recipe:
    """All it takes to serve a run, as plain values: it travels to the process that does."""

    folder: str
    config: str = ""
    """The new run's, as TOML; empty: the folder holds a run, which is taken up."""
    cluster: str = ""
    """TOML whose [cluster] settings come over those of a run that is taken up."""
    data: str | None = None
    """Where the run's text is now, if it was moved."""
    door: Door | None = None

    def again(self) -> "Recipe":
        """To take the same run up after the process was lost."""
        begun = (Path(self.folder) / CONFIG).exists()
        return replace(self, config="", cluster=self.cluster or self.config) if begun else self


def recipe_of(config: RunConfig, folder: Path, **about: Any) -> Recipe:
    if config.inner.second_moment:
        raise UserError("Real machines do not exchange AdamW's state yet: leave second_moment out, or simulate the run.")
    return Recipe(str(folder), to_toml(config), **about)


def open_service(recipe: Recipe, progress: Any = None) -> Service:
    path = Path(recipe.folder)
    if recipe.config:
        config = _read(recipe.config)
        if config.data.task == "external":
            return external_run(config, path)
        task, config = build_task(_moved(config, recipe.data), progress)
        return new_run(task, config, path)
    folder = RunFolder.open(path)
    config = folder.config()
    if config.digest() != folder.meta()["config_digest"]:
        raise UserError(f"{path / CONFIG} is not the config this run was started with: restore it, or start a new run.")
    changes = {n: v for n, v in parse_toml(recipe.cluster, "the settings").items() if FIELDS[n] == "cluster"}
    config = with_fields(config, changes)
    if config.data.task == "external":
        return external_run(config, path)
    return old_run(build_task(_moved(config, recipe.data), progress)[0], folder, config)


def _read(text: str) -> RunConfig:
    return resolve(with_fields(RunConfig(), parse_toml(text, "the run's config")))


def _moved(config: RunConfig, data: str | None) -> RunConfig:
    return config if data is None else replace(config, data=replace(config.data, data=data))


class Host:
    def __init__(self, recipe: Recipe, progress: Any = None) -> None:
        give_memory_back()
        self.service = open_service(recipe, progress)
        self.keeper = Housekeeper(self.service)
        self.gateway: Any = None
        self.token = self.news = ""
        try:
            if recipe.door is not None:
                self._open(recipe.door, Path(recipe.folder))
            self.keeper.start()
        except BaseException:
            self.service.close()
            raise

    def _open(self, door: Door, folder: Path) -> None:
        from heloco.engine.cluster.gateway.credentials import Credentials
        from heloco.engine.cluster.gateway.server import GatewayServer

        credentials = Credentials.found_or_made(folder / CREDENTIALS, door.names, cert=door.cert, key=door.key)
        before = Door.kept(folder)
        port = before.port if not door.port and before and before.host == door.host else door.port  # any, but the same again
        self.gateway = GatewayServer(self.service, credentials, door.host, port, page=_made(door.page, folder))
        try:
            self.gateway.start()
        except UserError:
            if port == door.port:
                raise
            self.gateway.port = door.port  # somebody else has it now
            self.gateway.start()
        replace(door, port=self.gateway.port).keep(folder)
        self.token, self.news = credentials.token, credentials.news

    @property
    def address(self) -> str:
        return self.gateway.address if self.gateway else ""

    def status(self) -> dict[str, Any]:
        return self.service.status()

    def stop(self, reason: str) -> None:
        self.service.stop(reason)

    def close(self) -> None:
        """What is under way is in the journal; nothing is lost by closing."""
        self.keeper.end()
        if not self.service.failed:
            self.service.save_if_due()
        if self.gateway is not None:
            self.gateway.stop()
        self.service.close()


def _made(page: str, folder: Path) -> Any:
    if not page:
        return None
    module, _, name = page.partition(":")
    make: Callable[[Path], Any] = getattr(importlib.import_module(module), name)
    return make(folder)


class LocalWorkers:
    """Machines of this run on this machine: `heloco join` in processes of their own, with their words in the run's folder."""

    def __init__(self, count: int, address: str, token: str, folder: Path, extra: tuple[str, ...] = ()) -> None:
        self.folder = folder / "workers"
        self.folder.mkdir(exist_ok=True)
        threads = str(max(1, (os.cpu_count() or 1) // max(1, count)))
        environment = os.environ | {"HELOCO_TOKEN": token, "OMP_NUM_THREADS": threads}
        command = [sys.executable, "-m", "heloco.cli", "join", address, *extra]
        self.processes = [self._start([*command, "--name", f"local-{i}"], environment, i) for i in range(count)]

    def _start(self, command: list[str], environment: dict[str, str], number: int) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{number}.log").open("ab") as log:
            return subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def failed(self) -> str:
        """What the first one said that ended badly; empty where none did."""
        for number, process in enumerate(self.processes):
            if process.poll() not in (None, 0):
                words = (self.folder / f"{number}.log").read_text(errors="replace").strip().splitlines()
                return words[-1] if words else f"it ended with {process.returncode}"
        return ""

    def end(self, patience_s: float = 20.0) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            try:
                process.wait(patience_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
