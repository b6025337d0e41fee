"""A run's service in one process, with its housekeeper, tokens and gateway."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from heloco.cluster.protocol.messages import Right, Status, TokenInfo, TokenList
from heloco.cluster.server.adopted_process import AdoptedProcess, adopt_or_start
from heloco.cluster.server.descriptors import raise_descriptor_limit
from heloco.cluster.server.housekeeping import Housekeeper
from heloco.cluster.server.open_run import external_run, new_run, old_run
from heloco.cluster.server.service import Service
from heloco.cluster.server.token_book import TokenBook
from heloco.disk import write_atomically
from heloco.engine.build import build_task
from heloco.errors import UserError
from heloco.records.run_files import CONFIG, CREDENTIALS, WORKERS
from heloco.run import RunConfig, RunFolder, resolve, with_fields
from heloco.run.config import FIELDS
from heloco.run.settings import parse_toml, to_toml

LISTEN = "listen.json"
END_WITH_STDIN = "--end-with-stdin"
"""The flag of `heloco join` for a worker that must not outlive the process that started it."""
GATEWAY = "heloco.cluster.gateway.https_server:open_gateway"
"""Loaded by name, because this room may not import the gateway."""


@dataclass(frozen=True)
class ListenConfig:
    """Where the gateway listens, and the host names in its certificate."""

    host: str = "127.0.0.1"
    port: int = 8443
    names: tuple[str, ...] = ()
    cert: str = ""
    """The user's own certificate file; if empty, a certificate is made."""
    key: str = ""
    page: str = ""
    """The function that makes the live page, as "module:function". It gets the run's folder and what gives the run's status."""

    def save(self, folder: Path) -> None:
        """Stores the address in the run's folder, so that the run is served at the same address again."""
        values = {name: value for name, value in asdict(self).items() if name != "page"}
        write_atomically(folder / CREDENTIALS / LISTEN, json.dumps(values).encode(), mode=0o600)

    @classmethod
    def load(cls, folder: Path) -> "ListenConfig | None":
        """The address at which the run in this folder was last served; None if that is not known."""
        try:
            values = json.loads((folder / CREDENTIALS / LISTEN).read_text())
            config = cls(**{**values, "names": tuple(map(str, values["names"]))})
        except (OSError, ValueError, TypeError, KeyError):
            return None
        is_valid = isinstance(config.host, str) and isinstance(config.port, int) and 0 <= config.port < 65536
        return config if is_valid and isinstance(config.cert, str) and isinstance(config.key, str) else None


@dataclass(frozen=True)
class ServeSpec:
    """Everything that is needed to serve a run, as plain values that can be sent to another process."""

    folder: str
    config: str = ""
    """Config of a new run as TOML; if empty, the run in the folder is resumed."""
    cluster: str = ""
    """TOML whose [cluster] settings replace those of a run that is resumed."""
    data: str | None = None
    """New place of the run's text, if it was moved."""
    listen: ListenConfig | None = None

    def for_restart(self) -> "ServeSpec":
        """The spec that resumes the same run after its process has died."""
        has_begun = (Path(self.folder) / CONFIG).exists()
        return replace(self, config="", cluster=self.cluster or self.config) if has_begun else self


def spec_of(config: RunConfig, folder: Path, *, listen: ListenConfig | None = None) -> ServeSpec:
    """The spec that serves a new run with this config in `folder`, over HTTPS if `listen` says where."""
    return ServeSpec(str(folder), to_toml(config), listen=listen)


def open_service(spec: ServeSpec, progress: Any = None) -> Service:
    """The service of a new run, or of the run in the folder, as `spec` says. Raises UserError if the config, the data or the
    folder cannot be used. `progress` is called while data is prepared."""
    path = Path(spec.folder)
    if spec.config:
        config = resolve(with_fields(RunConfig(), parse_toml(spec.config, "the run's config")))
        if config.input.task == "external":
            return external_run(config, path)
        task, config = build_task(_with_data(config, spec.data), progress)
        return new_run(task, config, path, task_config=config)
    folder = RunFolder.open(path)
    config = folder.config()
    if config.digest() != folder.facts().config_digest:
        raise UserError(f"{path / CONFIG} is not the config this run was started with: restore it, or start a new run.")
    changes = {n: v for n, v in parse_toml(spec.cluster, "the settings").items() if FIELDS.get(n) == "cluster"}
    config = with_fields(config, changes)
    if config.input.task == "external":
        return external_run(config, path)
    task, task_config = build_task(_with_data(config, spec.data), progress)
    return old_run(task, folder, config, task_config=task_config)


def _with_data(config: RunConfig, data: str | None) -> RunConfig:
    return config if data is None else replace(config, input=replace(config.input, data=data))


class Gateway(Protocol):
    """A server that offers a run over the network."""

    address: str
    port: int
    fingerprint: str
    """SHA-256 of the gateway's certificate."""

    def stop(self) -> None:
        """Closes the address and all connections. The run itself goes on."""


class RunHost:
    """Serves a run from its construction until `close`. Without `listen` there is no gateway."""

    def __init__(self, service: Service, listen: ListenConfig | None = None) -> None:
        self.service = service
        self.keeper = Housekeeper(service.housekeeping)
        self.tokens: TokenBook | None = None
        self.gateway: Gateway | None = None
        try:
            if listen is not None:
                self._listen(listen, service.state.folder)
            self.keeper.start()
        except BaseException:
            service.close()
            raise

    @classmethod
    def open(cls, spec: ServeSpec, progress: Any = None) -> "RunHost":
        """Begins or resumes the run that `spec` describes and serves it, over HTTPS if the spec has `listen`.

        Raises UserError if the config, the data or the run's folder cannot be used. `progress` is called while data is prepared.
        """
        raise_descriptor_limit()
        return cls(open_service(spec, progress), spec.listen)

    def _listen(self, listen: ListenConfig, folder: Path) -> None:
        self.tokens = TokenBook(folder / CREDENTIALS)
        previous = ListenConfig.load(folder)
        port = listen.port
        if not port and previous is not None and previous.host == listen.host:
            port = previous.port  # port 0 means any port: prefer the one from last time
        open_gateway = _load(GATEWAY)
        page = _load(listen.page)(folder, self.status) if listen.page else None
        try:
            self.gateway = open_gateway(self, replace(listen, port=port), folder / CREDENTIALS, page)
        except UserError:
            if port == listen.port:
                raise
            self.gateway = open_gateway(self, listen, folder / CREDENTIALS, page)  # another process uses that port now
        assert self.gateway is not None
        replace(listen, port=self.gateway.port).save(folder)

    @property
    def address(self) -> str:
        """The gateway's URL, as machines join it; empty if there is no gateway."""
        return self.gateway.address if self.gateway else ""

    def token(self, right: Right) -> str:
        """A valid token, in the form that is pasted; empty if there is no gateway."""
        if self.gateway is None or self.tokens is None:
            return ""
        return self.tokens.text(self.tokens.first(right), self.gateway.fingerprint)

    # ---- controlling it

    def status(self) -> Status:
        """Where the run stands, with its machines, pauses and ending. May be called from any thread."""
        return self.service.admin.status()

    def stop(self, text: str) -> None:
        """Saves the run and ends it for all machines, with the reason `text`. The gateway answers until `close`."""
        self.service.admin.stop(text)

    def suspend(self, text: str) -> None:
        """Saves the run, to be served again: machines keep their rounds and wait. The gateway answers until `close`."""
        self.service.admin.suspend(text)

    def list_tokens(self) -> TokenList:
        """All tokens, without their secrets."""
        machine_tokens = [machine.token for machine in self.status().machines]
        tokens = self.tokens.all() if self.tokens else []
        return TokenList(tokens=tuple(token.info(machine_tokens.count(token.id)) for token in tokens))

    def new_token(self, right: Right, note: str) -> TokenInfo:
        """Makes a token with this right and returns it with its secret, which is shown only here. `note` says what it is for.

        Raises UserError if the run has no gateway, and Refused if it has too many tokens.
        """
        tokens, gateway = self._tokens_and_gateway()
        token = tokens.add(right, note)
        return token.info(token=tokens.text(token, gateway.fingerprint))

    def revoke_token(self, token_id: str) -> None:
        """Revokes a token, and evicts the machines that joined with it."""
        tokens, _ = self._tokens_and_gateway()
        token = tokens.revoke(token_id)
        if token.right == "worker":
            self.service.members.evict_token(token_id, f"its token, {token_id}, was revoked")

    def _tokens_and_gateway(self) -> tuple[TokenBook, Gateway]:
        if self.tokens is None or self.gateway is None:
            raise UserError("This run is not served over HTTPS, so it has no tokens.")
        return self.tokens, self.gateway

    def close(self) -> None:
        """Stops serving. Rounds under way are in the journal, so nothing is lost."""
        self.keeper.end()
        self.service.housekeeping.save_if_due(wait=True)
        self.service.finish_evaluations()
        if self.gateway is not None:
            self.gateway.stop()
        self.service.close()


def _load(name: str) -> Callable[..., Any]:
    module, _, function_name = name.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), function_name)
    return function


class LocalWorkers:
    """Worker processes on this machine: each runs `heloco join`, with its output in the run's folder."""

    def __init__(
        self, count: int, address: str, token: str, folder: Path, extra: tuple[str, ...] = (), lifeline: int | None = None
    ) -> None:
        """`lifeline`: a pipe's end to read from. Workers end when nobody holds its other end any more. None: when this ends."""
        self._lifeline, self._lifeline_end = (lifeline, -1) if lifeline is not None else os.pipe()
        self.folder = folder / WORKERS
        self.folder.mkdir(exist_ok=True)
        threads = str(max(1, (os.cpu_count() or 1) // max(1, count)))
        environment = os.environ | {"HELOCO_TOKEN": token, "OMP_NUM_THREADS": threads}
        command = [sys.executable, "-m", "heloco.cli", "join", address, END_WITH_STDIN, *extra]
        self.processes = [self._start([*command, "--name", f"local-{i}"], environment, i) for i in range(count)]

    def _start(self, command: list[str], environment: dict[str, str], number: int) -> "subprocess.Popen[bytes] | AdoptedProcess":
        with (self.folder / f"{number}.log").open("ab") as log:
            options: dict[str, Any] = {"env": environment, "stdout": log, "stderr": log, "start_new_session": True}
            return adopt_or_start(self.folder / f"{number}.pid", self._lifeline, command, **options)

    def failure(self) -> str | None:
        """The last line of the first worker that ended with an error; None if none did."""
        for number, process in enumerate(self.processes):
            if process.poll() not in (None, 0):
                lines = (self.folder / f"{number}.log").read_text(errors="replace").strip().splitlines()
                return lines[-1] if lines else f"it ended with {process.returncode}"
        return None

    def end(self, patience_s: float = 20.0) -> None:
        """Ends all worker processes: asks each to end, waits up to `patience_s` for each in turn, and then kills those that
        still run."""
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            try:
                process.wait(patience_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._lifeline_end >= 0:
            os.close(self._lifeline_end)
            os.close(self._lifeline)
            self._lifeline_end = -1
