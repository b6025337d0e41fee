"""Calls of the service from the gateway's loop. Each kind of call has its own threads, so that no kind waits for another. Every
request is answered soon, also while the synchronizer is busy."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.server.service import Service
from heloco.errors import UserError

T = TypeVar("T")
SHORT, COMMITS, FILES = 16, 4, 8
"""Number of threads for each kind of call."""
SPARE_DOWNLOADS = 64
"""How many files may be downloaded at the same time, in addition to one for each seat of the run. A
client that reads slowly over many connections must not use up the descriptors."""
ANSWER_S = 8.0
"""Every request is answered within this time, if only with 202. A client takes a connection for dead after a bit more than twice
this time without an answer."""
SIGN_S = 1.0
START_S = 60.0
"""Timeout for the start of the threads, on a machine that is very busy."""


class WarmThreads:
    """Threads that all run already, and wait. A call gets the one that was used last, because its memory is still in the cache:
    an upload whose pieces go to eight threads in turn takes a tenth longer."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads = [started_pool(1, f"{name}-{i}") for i in range(threads)]
        self._idle = list(self._threads)
        self._places = asyncio.Semaphore(threads)

    async def call(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Calls the function in a thread, when one is idle."""
        await self._places.acquire()
        thread = self._idle.pop()
        job = thread.submit(function, *arguments, **options)
        try:
            return await asyncio.wrap_future(job)
        finally:
            if job.done():
                self._put_back(thread)
            else:  # nobody waits for it any more, but the thread is still busy
                loop = asyncio.get_running_loop()
                job.add_done_callback(lambda _: _call_unless_closed(loop, self._put_back, thread))

    def _put_back(self, thread: ThreadPoolExecutor) -> None:
        self._idle.append(thread)
        self._places.release()

    def shutdown(self) -> None:
        """Waits for the calls under way."""
        for thread in self._threads:
            thread.shutdown(cancel_futures=True)


def _call_unless_closed(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *arguments: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop may be closed by now
        loop.call_soon_threadsafe(function, *arguments)


def started_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads all run already. Later the system may have no thread left."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    all_run = threading.Barrier(threads + 1)
    try:
        for _ in range(threads):
            pool.submit(all_run.wait)  # blocks its thread until all threads run
        all_run.wait(START_S)
    except (RuntimeError, threading.BrokenBarrierError) as error:
        all_run.abort()
        pool.shutdown(wait=False)
        raise UserError(
            f"The threads of the gateway cannot be started ({error}): end other processes, or raise the limit (`ulimit -u`)."
        ) from error
    return pool


class Calls:
    """Runs calls of the service on thread pools, one pool for each kind of call, so that the event loop never blocks."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._short = WarmThreads(SHORT, "gateway-short")
        self._commits = started_pool(COMMITS, "gateway-commits")
        self._files = WarmThreads(FILES, "gateway-files")
        self.downloads = 0
        self._under_way: dict[Hashable, asyncio.Future[Any]] = {}

    async def call_locked(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Calls a function with the service's lock. Raises `Refused` (busy) if the lock cannot be taken in time."""
        until = time.monotonic() + ANSWER_S

        def call() -> T:
            if not self.service.state.lock.acquire(timeout=max(0.0, until - time.monotonic())):
                raise Refused(RefusalCode.BUSY, "The synchronizer is busy: ask again.")
            try:
                return function(*arguments, **options)
            finally:
                self.service.state.lock.release()

        return await self._short.call(call)

    async def call_quick(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a function that does not wait for the service's lock, or not for long."""
        return await self._short.call(function, *arguments)

    async def call_on_file(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a function that reads or writes a piece of a file."""
        return await self._files.call(function, *arguments)

    def begin_download(self) -> None:
        """Counts a download. Raises `Refused` if there are too many. `end_download` must follow."""
        if self.downloads >= self.service.state.roster.seats + SPARE_DOWNLOADS:
            raise Refused(RefusalCode.BUSY, "Too many files are going out at the moment: ask again.")
        self.downloads += 1

    def end_download(self) -> None:
        self.downloads -= 1

    async def call_long(self, name: Hashable, machine: str | None, function: Callable[..., T], *arguments: Any) -> T | None:
        """Calls a slow function. Returns None if it takes longer than `ANSWER_S`; a repeated request waits for the same call."""
        call = self._under_way.get(name)
        if call is None:
            call = asyncio.get_running_loop().run_in_executor(self._commits, function, *arguments)
            call.add_done_callback(lambda future: self._forget(name, future))
            self._under_way[name] = call
        until = time.monotonic() + ANSWER_S
        while not call.done() and time.monotonic() < until:
            await asyncio.wait({call}, timeout=SIGN_S)
            if machine is not None:
                self.service.state.note_transfer(machine)  # it waits for us, so it is not lost
        return call.result() if call.done() else None

    def _forget(self, name: Hashable, future: "asyncio.Future[Any]") -> None:
        del self._under_way[name]
        if not future.cancelled():
            future.exception()  # marks it as retrieved: the client may be gone

    def close(self) -> None:
        """Waits for the calls under way, because none may touch a service that is closed."""
        self._short.shutdown()
        self._files.shutdown()
        self._commits.shutdown(cancel_futures=True)


class Changes:
    """Tells the loop when the run has changed. One thread waits for all requests."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._next = asyncio.Event()
        self._is_over = False
        threading.Thread(target=self._watch, name="gateway-changes", daemon=True).start()

    def _watch(self) -> None:
        with self._service.state.changed:  # the lock is held from one wait to the next, so no change is missed
            while not self._is_over:
                self._service.state.changed.wait(SIGN_S)
                _call_unless_closed(self._loop, self._tell)

    def _tell(self) -> None:
        self._next.set()
        if not self._is_over:
            self._next = asyncio.Event()

    def next(self) -> asyncio.Event:
        """An event that is set at the next change. Get it before you look at the run, so that no change is missed."""
        return self._next

    @property
    def is_over(self) -> bool:
        return self._is_over

    def end(self) -> None:
        """Wakes all waiting requests for good. Call it in the loop."""
        self._is_over = True
        self._next.set()
