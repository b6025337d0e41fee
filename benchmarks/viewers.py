"""What viewers of the live page cost a served run, over HTTPS on loopback. `benchmarks/latency.py` shows the numbers.

Machines that do not train hand in a tiny model as fast as they can, while viewers in another process read the page's events.
Each number of viewers has a run of its own, in several rounds.
"""

import asyncio
import contextlib
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import arrival
import many_machines
from heloco.cluster.gateway.https_link import HttpsLink
from heloco.cluster.gateway.pinned import pin_certificate
from heloco.cluster.protocol.tokens import parse_token
from heloco.cluster.server.process import ListenConfig, RunHost, spec_of
from heloco.run import RunConfig

MACHINES = 4


@contextlib.contextmanager
def child(target: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """A process that is asked to end when the context does. Yields the connection to it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        with contextlib.suppress(OSError):
            ours.send("over")
        process.join()


def serve(config: RunConfig, folder: str, parent: Any) -> None:
    listen = ListenConfig("127.0.0.1", 0, page="heloco.cli.page:page_of")
    host = RunHost.open(spec_of(config, Path(folder), listen=listen))
    parent.send((host.address, host.token("worker"), host.token("viewer")))
    parent.recv()
    host.close()


def look_at_page(address: str, token: str, viewers: int, parent: Any) -> None:
    """Reads the page's events over as many connections as there are viewers. Answers each question with the bytes received."""
    parsed, place = parse_token(token), urlsplit(address)
    context = pin_certificate(address, parsed.fingerprint, 20.0)
    bytes_received = [0] * viewers

    async def view(viewer: int) -> None:
        reader, writer = await asyncio.open_connection(place.hostname, place.port, ssl=context)
        writer.write(f"GET /page/events?key={parsed.secret}&seen=-1 HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode())
        is_open = b" 200 " in await reader.readline()
        while is_open and (piece := await reader.read(1 << 16)):
            bytes_received[viewer] += len(piece)
        raise ConnectionError("The gateway refused a viewer, or ended its connection.")

    async def view_all() -> None:
        streams = [asyncio.create_task(view(i)) for i in range(viewers)]
        while await asyncio.to_thread(parent.recv) != "over":
            for stream in streams:
                if stream.done():
                    stream.result()
            parent.send(bytes_received)

    asyncio.run(view_all())


def measure_viewers(viewers: int, seconds: float, disk: Path | None) -> dict[str, float]:
    def bytes_received() -> list[int]:
        page.send("how many?")
        answer: list[int] = page.recv()
        return answer

    is_over, arrivals, config = threading.Event(), list[int](), arrival.config(MACHINES)
    with tempfile.TemporaryDirectory(dir=disk) as folder, child(serve, config, f"{folder}/run") as server:
        address, worker_token, viewer_token = server.recv()
        with ThreadPoolExecutor(MACHINES) as threads:
            for i in range(MACHINES):
                threads.submit(many_machines.machine, HttpsLink(address, worker_token), f"m{i}", is_over, arrivals)
            while len(arrivals) < 2 * MACHINES:
                time.sleep(0.05)
            with contextlib.ExitStack() as stack:
                stack.callback(is_over.set)
                page = stack.enter_context(child(look_at_page, address, viewer_token, viewers))
                while not all(bytes_received()):
                    time.sleep(0.1)
                arrivals_before, bytes_before, begin_s = len(arrivals), sum(bytes_received()), time.monotonic()
                time.sleep(seconds)
                count, took_s = len(arrivals) - arrivals_before, time.monotonic() - begin_s
                size = sum(bytes_received()) - bytes_before
    return {"viewers": viewers, "arrivals_per_s": count / took_s, "bytes_per_viewer_and_arrival": size / max(1, viewers * count)}


def compare_viewers(counts: list[int], rounds: int, seconds: float, disk: Path | None) -> list[dict[str, float]]:
    """Medians of the rounds. A ratio is to the first count of the same round."""
    results = [[measure_viewers(count, seconds, disk) for count in counts] for _ in range(rounds)]
    rows = []
    for same_count in zip(*results, strict=True):
        row = {name: statistics.median(each[name] for each in same_count) for name in same_count[0]}
        ratios = [each["arrivals_per_s"] / one[0]["arrivals_per_s"] for each, one in zip(same_count, results, strict=True)]
        rows.append({**row, "viewers": same_count[0]["viewers"], "ratio": statistics.median(ratios)})
    return rows
