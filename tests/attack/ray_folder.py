"""Another user of the machine attacks the Ray that `heloco serve` starts. It tries to plant files in
Ray's folder, to name another address in `ray_current_cluster`, to read or replace the token, to reach
Ray's sockets, and to talk to Ray's ports without a token.

Needs root, to become that other user. Alone: `python tests/attack/ray_folder.py`; `--help` names its options.
"""

import contextlib
import os
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

from rig import Failed, Serving, check, elsewhere, judge, run_alone

OTHER_USER = 12345
_LISTENING = "0A"


# ---- the attacker


class Listener:
    """A server that Ray might be led to: keeps every token that it is shown."""

    def __init__(self) -> None:
        import grpc

        tokens = self.tokens = list[str]()

        class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
            def service(self, details: Any) -> None:
                tokens.extend(value for key, value in details.invocation_metadata if key == "authorization")

        self._server = grpc.server(futures.ThreadPoolExecutor(2), handlers=(Handler(),))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()


FIND_S = 60.0
"""How long `heloco serve` may take to start Ray."""


def sneak(serve: int, seconds: float) -> dict[str, int]:
    """What succeeded, as another user, from the start of `heloco serve` on, and for so long after Ray's folder is known."""
    listener, counts, until_s = Listener(), Counter[str](), time.monotonic() + FIND_S
    os.setgroups([])
    os.setgid(OTHER_USER)
    os.setuid(OTHER_USER)
    while (ray_place := _ray_of(serve)) is None and time.monotonic() < until_s:
        time.sleep(0.002)
    if ray_place is None:
        return {}
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        counts["tries"] += 1
        for folder in {Path(ray_place[0]), Path(ray_place[0]).parent, *_sessions(Path(ray_place[0]))}:
            _try_folder(folder, listener.port, counts)
        if counts["tries"] % 50 == 1:
            counts["client port answers without a token"] += _answers(ray_place[1])
        time.sleep(0.002)
    counts["tokens received"] = len(listener.tokens)
    return dict(counts)


def _ray_of(serve: int) -> tuple[str, int] | None:
    """Ray's folder and its clients' port, from the process list, which everybody may read."""
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            command = (process / "cmdline").read_bytes() if process.name.isdigit() else b""
            folder = re.search(rb"--temp-dir=([^\0]+)", command)
            port = re.search(rb"--ray-client-server-port=(\d+)", command)
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1]) if folder and port else 0
            if folder and port and parent == serve:
                return folder[1].decode(), int(port[1])
    return None


def _sessions(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [path / below for path in folder.glob("session_*") for below in ("", "sockets", "logs")]
    return []


def _try_folder(folder: Path, port: int, counts: Counter[str]) -> None:
    def count_attempt(name: str) -> Iterator[None]:
        with contextlib.suppress(OSError):
            yield
            counts[name] += 1

    attempt = contextlib.contextmanager(count_attempt)
    with attempt("folder listed"):
        list(folder.iterdir())
    with attempt("ray_current_cluster written"):
        (folder / "ray_current_cluster").write_text(f"127.0.0.1:{port}")
    with attempt("file planted"):
        (folder / "planted").write_text("x")
    with attempt("link planted"):
        (folder / "linked").symlink_to("/etc/passwd")
    with attempt("token read"):
        (folder / "token").read_text()
    with attempt("token replaced"):
        (folder / "token").unlink()
        (folder / "token").write_text("mine")
    with attempt("socket reached"), socket.socket(socket.AF_UNIX) as reached:
        reached.connect(str(folder / "raylet"))


def _answers(port: int) -> bool:
    import grpc

    with contextlib.suppress(grpc.RpcError), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        channel.unary_unary("/ray.rpc.RayletDriver/ClusterInfo")(b"", timeout=3)
        return True
    return False


# ---- who listens where


def family(pid: int) -> set[int]:
    """A process and all that descend from it."""
    parents: dict[int, int] = {}
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
    members = {pid}
    while more := {child for child, parent in parents.items() if parent in members} - members:
        members |= more
    return members


def listening(processes: set[int]) -> dict[str, str]:
    """Address and port -> the process that listens there."""
    inodes: dict[str, str] = {}
    for pid in processes:
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            for handle in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes[str(handle.readlink())] = name
    owners = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            cells = line.split()
            if cells[3] == _LISTENING and (owner := inodes.get(f"socket:[{cells[9]}]")):
                address, _, port = cells[1].partition(":")
                owners[f"{_format_address(address)}:{int(port, 16)}"] = owner
    return owners


def _format_address(address: str) -> str:
    """The kernel writes each word of four bytes as a number."""
    words = [bytes.fromhex(address[at : at + 8]) for at in range(0, len(address), 8)]
    content = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    return socket.inet_ntop(socket.AF_INET if len(content) == 4 else socket.AF_INET6, content)


def beyond_loopback(owners: dict[str, str]) -> dict[str, str]:
    return {address: owner for address, owner in owners.items() if not address.startswith(("127.", "::1:", "::ffff:127."))}


# ---- the attack


def attack(folder: Path, seconds: float) -> dict[str, Any]:
    """No other user gets at the Ray of a run."""
    if os.geteuid() != 0:
        raise Failed("this attack needs root, to become another user")
    with Serving(folder, ray="auto", wait=False) as serving, elsewhere(sneak, serving.process.pid, seconds) as result:
        serving.wait()
        outside = beyond_loopback(listening(family(serving.process.pid)))
        counts = result(seconds + FIND_S + 60)
        serving.check_well()
    tries = counts.pop("tries", 0)
    check(tries, "the attacker did not find Ray's folder")
    figures = {"tries": tries, "succeeded": {name: n for name, n in counts.items() if n}, "listening_beyond_loopback": outside}
    return judge(figures, nothing_succeeded=not figures["succeeded"], all_listen_on_loopback=not outside)


if __name__ == "__main__":
    run_alone(attack, seconds=40.0)
