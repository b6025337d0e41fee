"""Proxies in front of the gateway, which can cut connections or stop forwarding."""

import asyncio
import contextlib
import threading


class Proxies:
    """One proxy for each worker."""

    def __init__(self, target: int, count: int) -> None:
        self.ports: list[int] = []
        self._target = target
        self._writers: list[set[asyncio.StreamWriter]] = [set() for _ in range(count)]
        self._passing: list[asyncio.Event] = []
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        threading.Thread(target=self._run, args=(count, ready), daemon=True).start()
        ready.wait()

    def _run(self, count: int, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._open(count))
        ready.set()
        self._loop.run_forever()

    async def _open(self, count: int) -> None:
        for number in range(count):
            self._passing.append(asyncio.Event())
            self._passing[number].set()
            server = await asyncio.start_server(lambda r, w, n=number: self._carry(n, r, w), "127.0.0.1", 0)  # type: ignore[misc]
            self.ports.append(server.sockets[0].getsockname()[1])

    async def _carry(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answer_reader, onward = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        self._writers[number] |= {writer, onward}
        await asyncio.gather(self._pump(number, reader, onward), self._pump(number, answer_reader, writer))
        self._writers[number] -= {writer, onward}

    async def _pump(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(1 << 16):
                await self._passing[number].wait()
                writer.write(piece)
                await writer.drain()
        with contextlib.suppress(OSError, RuntimeError):
            writer.close()

    def cut(self, number: int) -> None:
        self._loop.call_soon_threadsafe(lambda: [w.transport.abort() for w in self._writers[number]])

    def hold(self, number: int, seconds: float) -> None:
        """Keeps connections open without forwarding anything, and then closes them."""

        def begin() -> None:
            self._passing[number].clear()
            self._loop.call_later(seconds, end)

        def end() -> None:
            self.cut(number)
            self._passing[number].set()

        self._loop.call_soon_threadsafe(begin)
