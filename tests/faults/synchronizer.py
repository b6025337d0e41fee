"""The process of the synchronizer with its gateway, in a run with faults."""

import contextlib
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import heloco.cluster.gateway.server  # noqa: F401 - so that forks need not import it
from heloco.cluster.protocol.messages import to_plain
from heloco.cluster.server.process import ListenConfig, RunHost, ServeSpec
from heloco.errors import RunStopped, UserError


def serve(folder: str, config: str, port: int, state: str) -> None:
    """Serves until SIGTERM, or until the run has failed. It writes its status to the file `state`."""
    torch.set_num_threads(1)
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    host = None
    try:
        host = RunHost.open(spec_for(folder, config, port))
        for notice in host.service.notices:
            print(f"synchronizer: {notice}", file=sys.stderr, flush=True)
        tokens = {right: host.token(right) for right in ("worker", "admin")}
        while not signals and not host.service.state.has_failed:
            write(state, {"tokens": tokens, **to_plain(host.status())})
            time.sleep(0.02)
        if host.service.state.has_failed:
            print(f"synchronizer: {host.service.state.ended}", file=sys.stderr, flush=True)
        else:
            write(state, {"tokens": tokens, **to_plain(host.status())})
    except (UserError, RunStopped, OSError) as error:
        print(f"synchronizer: {error}", file=sys.stderr, flush=True)
    finally:
        if host is not None:
            with contextlib.suppress(UserError, RunStopped, OSError):
                host.close()


def spec_for(folder: str, config: str, port: int) -> ServeSpec:
    has_begun = (Path(folder) / "config.toml").exists()
    listen = ListenConfig("127.0.0.1", port)
    return ServeSpec(folder, "" if has_begun else config, config if has_begun else "", listen=listen)


def write(path: str, content: dict[str, Any]) -> None:
    Path(f"{path}.new").write_text(json.dumps(content))
    Path(f"{path}.new").replace(path)
