"""What it costs to move bytes to another process and as many back, and nothing else: the least that a link can take."""

import multiprocessing
import socket
import ssl
import statistics
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

PIECE = 1 << 16
Times = dict[str, float]


def _receive(connection: ssl.SSLSocket, room: memoryview) -> None:
    at = 0
    while at < len(room):
        at += connection.recv_into(room[at : at + PIECE])


def _send(connection: ssl.SSLSocket, content: memoryview) -> None:
    for at in range(0, len(content), PIECE):
        connection.sendall(content[at : at + PIECE])


def _answer(certificate: str, key: str, size: int, pipe: Any) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        pipe.send(listening.getsockname()[1])
        connection = context.wrap_socket(listening.accept()[0], server_side=True)
    room = memoryview(np.ones(size, np.uint8))
    with connection:
        while pipe.recv():
            _receive(connection, room)
            connection.sendall(b"!")
            _send(connection, room)


def over_tls(size: int, repeats: int) -> Times:
    """Medians of the seconds up and down through one TLS connection on loopback, with a thread on each side."""
    from heloco.cluster.gateway.credentials import self_signed

    now = datetime.now(UTC)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("certificate", "key")]
        for path, content in zip(
            files, self_signed(["127.0.0.1"], now - timedelta(days=1), now + timedelta(days=1)), strict=True
        ):
            path.write_bytes(content)
        processes = multiprocessing.get_context("spawn")
        ours, theirs = processes.Pipe()
        process = processes.Process(target=_answer, args=(*map(str, files), size, theirs))
        process.start()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        room = memoryview(np.ones(size, np.uint8))
        times = []
        with context.wrap_socket(socket.create_connection(("127.0.0.1", ours.recv()))) as connection:
            for _ in range(repeats + 1):
                ours.send(True)
                began = time.perf_counter()
                _send(connection, room)
                connection.recv(1)
                middle = time.perf_counter()
                _receive(connection, room)
                times.append((middle - began, time.perf_counter() - middle))
            ours.send(False)
        process.join()
    return _medians(times)


def over_ray(size: int, repeats: int) -> Times:
    """The same through Ray's object store, to an actor and back: put, get as a view, read it once. Ray must be there."""
    import ray

    @ray.remote(num_cpus=0)
    class Echo:
        def __init__(self) -> None:
            self.room = np.ones(size, np.uint8)

        def up(self, boxed: list[Any]) -> None:
            self.room[:] = ray.get(boxed[0])

        def down(self) -> list[Any]:
            return [ray.put(self.room)]

    actor, room, times = Echo.remote(), np.ones(size, np.uint8), []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        ray.get(actor.up.remote([ray.put(room)]))
        middle = time.perf_counter()
        room[:] = ray.get(ray.get(actor.down.remote())[0])
        times.append((middle - began, time.perf_counter() - middle))
    ray.kill(actor)
    return _medians(times)


def _medians(times: list[tuple[float, float]]) -> Times:
    up, down = (statistics.median(way) for way in zip(*times[1:], strict=True))  # the first also makes the memory
    return {"up_s": up, "down_s": down}
