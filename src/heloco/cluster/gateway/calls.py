"""The service called from the gateway's loop: in threads, each kind of call with threads of its own, so that none waits behind
another kind; and every request answered soon, also while the synchronizer is busy."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from heloco.cluster.protocol.refusals import Code, Refused
from heloco.cluster.server.service import Service
from heloco.errors import UserError

T = TypeVar("T")
SHORT, COMMITS, FILES = 16, 4, 8
"""Threads."""
DOWNLOADS_BESIDES = 64
"""Files that may go out at the same time, besides one for each seat of the run. Whoever reads slowly
over many connections must not use up the descriptors."""
ANSWER_S = 8.0
"""At the latest then a request is answered, if only to say that it is still under way: who hears nothing for longer than twice
that must take the connection for dead."""
SIGN_S = 1.0
START_S = 60.0
"""For threads to start, on a machine that is very busy."""


def started_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads all run already: later the system may have none left to give."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    all_run = threading.Barrier(threads + 1)
    try:
        for _ in range(threads):
            pool.submit(all_run.wait)  # none is free for the next one before all run
        all_run.wait(START_S)
    except (RuntimeError, threading.BrokenBarrierError) as error:
        all_run.abort()
        pool.shutdown(wait=False)
        raise UserError(
            f"The threads of the gateway cannot be started ({error}): end other processes, or raise the limit (`ulimit -u`)."
        ) from error
    return pool


class Calls:
    def __init__(self, service: Service) -> None:
        self.service = service
        self._short = started_pool(SHORT, "gateway-short")
        self._commits = started_pool(COMMITS, "gateway-commits")
        self._files = started_pool(FILES, "gateway-files")
        self._downloads = 0
        self._under_way: dict[Hashable, asyncio.Future[Any]] = {}

    async def locked(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Calls what takes the service's lock; says that it is busy where the lock is not to be had in time."""
        until = time.monotonic() + ANSWER_S

        def call() -> T:
            if not self.service.state.lock.acquire(timeout=max(0.0, until - time.monotonic())):
                raise Refused(Code.BUSY, "The synchronizer is busy: ask again.")
            try:
                return function(*arguments, **options)
            finally:
                self.service.state.lock.release()

        return await asyncio.get_running_loop().run_in_executor(self._short, call)

    async def on_file(self, function: Callable[..., T], *arguments: Any) -> T:
        """Reads or writes a piece of a file: fast, unless the disk is not."""
        return await asyncio.get_running_loop().run_in_executor(self._files, function, *arguments)

    def begin_download(self) -> None:
        """To be ended with `end_download`."""
        if self._downloads >= self.service.state.roster.seats + DOWNLOADS_BESIDES:
            raise Refused(Code.BUSY, "Too many files are going out at the moment: ask again.")
        self._downloads += 1

    def end_download(self) -> None:
        self._downloads -= 1

    async def long(self, name: Hashable, machine: str | None, function: Callable[..., T], *arguments: Any) -> T | None:
        """Calls what may take longer than an answer may: None then, and the same request again waits for the same call."""
        running = self._under_way.get(name)
        if running is None:
            running = asyncio.get_running_loop().run_in_executor(self._commits, function, *arguments)
            running.add_done_callback(lambda done: self._over(name, done))
            self._under_way[name] = running
        until = time.monotonic() + ANSWER_S
        while not running.done() and time.monotonic() < until:
            await asyncio.wait({running}, timeout=SIGN_S)
            if machine is not None:
                self.service.state.moved(machine)  # it can do nothing but wait for us
        return running.result() if running.done() else None

    def _over(self, name: Hashable, done: "asyncio.Future[Any]") -> None:
        del self._under_way[name]
        if not done.cancelled():
            done.exception()  # whoever asked may be gone

    def close(self) -> None:
        """Waits for what is under way: nothing of it may touch a service that is closed."""
        for threads in (self._short, self._commits, self._files):
            threads.shutdown(cancel_futures=True)


class Changes:
    """Tells the loop when something about the run has changed; one thread waits for all."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._next = asyncio.Event()
        self._over = False
        threading.Thread(target=self._watch, name="gateway-changes", daemon=True).start()

    def _watch(self) -> None:
        with self._service.state.changed:  # from one wait to the next the lock is ours: no change is missed
            while not self._over:
                self._service.state.changed.wait(SIGN_S)
                with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                    self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        self._next.set()
        if not self._over:
            self._next = asyncio.Event()

    def next(self) -> asyncio.Event:
        """Is set at the next change. Take it before you look: what changes in between is not lost then."""
        return self._next

    @property
    def over(self) -> bool:
        return self._over

    def end(self) -> None:
        """Wakes all that wait, for good. To be called in the loop."""
        self._over = True
        self._next.set()
