"""The gateway's threads: all run before they are needed, and the one that was used last is used next."""

import asyncio
import threading

import pytest

from heloco.cluster.gateway.calls import WarmThreads


@pytest.fixture
def threads():
    pool = WarmThreads(3, "test")
    yield pool
    pool.shutdown()


def test_calls_that_follow_each_other_stay_in_one_thread(threads):
    async def calls() -> set[int]:
        return {await threads.call(threading.get_ident) for _ in range(20)}

    assert len(asyncio.run(calls())) == 1


def test_as_many_calls_as_threads_run_at_once_and_one_more_waits(threads):
    gate, running = threading.Event(), threading.Semaphore(0)

    def hold() -> int:
        running.release()
        gate.wait()
        return threading.get_ident()

    async def calls() -> list[int]:
        held = [asyncio.ensure_future(threads.call(hold)) for _ in range(3)]
        later = asyncio.ensure_future(threads.call(threading.get_ident))
        for _ in range(3):
            await asyncio.to_thread(running.acquire)
        assert not later.done()
        gate.set()
        identities = await asyncio.gather(*held)
        assert await later in identities
        return identities

    assert len(set(asyncio.run(calls()))) == 3


def test_a_thread_whose_caller_has_left_is_not_used_before_it_is_idle_again(threads):
    gate, running = threading.Event(), threading.Event()

    def hold() -> None:
        running.set()
        gate.wait()

    async def calls() -> None:
        left = asyncio.ensure_future(threads.call(hold))
        await asyncio.to_thread(running.wait)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        free = {await threads.call(threading.get_ident) for _ in range(5)}
        assert len(free) == 1  # none of them waited for the busy one
        gate.set()
        arrived = threading.Barrier(3)  # three calls at once: all three threads are there again
        await asyncio.gather(*(threads.call(arrived.wait, 60) for _ in range(3)))

    asyncio.run(calls())


def test_what_a_call_raises_reaches_its_caller_and_the_thread_serves_on(threads):
    async def calls() -> int:
        for _ in range(4):
            with pytest.raises(ZeroDivisionError):
                await threads.call(divmod, 1, 0)
        return await threads.call(len, "abc")

    assert asyncio.run(calls()) == 3
