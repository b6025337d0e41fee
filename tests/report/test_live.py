"""The live page: however many look at it, its data is made, rendered and encoded once for all of them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

for part in ("starlette", "plotly", "jinja2"):
    pytest.importorskip(part, reason=f"{part} is not installed")

from starlette.requests import Request  # noqa: E402
from starlette.responses import StreamingResponse  # noqa: E402

from heloco.report import live  # noqa: E402
from heloco.report.live import Page  # noqa: E402
from heloco.report.run_reader import read_runs  # noqa: E402
from support.small_cluster import Hand, opened  # noqa: E402

VIEWERS, LIMIT_S = 50, 60.0


class Count:
    """Takes a function's place in the page's module and counts its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self._function: Callable[..., Any] = getattr(live, name)
        self.calls = 0
        monkeypatch.setattr(live, name, self)

    def __call__(self, *values: Any, **options: Any) -> Any:
        self.calls += 1
        return self._function(*values, **options)


def request(query: str = "") -> Request:
    return Request({"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": query.encode()})


async def data_frames(answer: Any) -> AsyncIterator[str]:
    """The events with the page's data."""
    assert isinstance(answer, StreamingResponse)
    async for frame in answer.body_iterator:
        assert isinstance(frame, str)
        if not frame.startswith("event: state\n"):
            yield frame


async def states(answer: Any) -> AsyncIterator[dict[str, Any]]:
    """The states of the only run, as the page gets them."""
    assert isinstance(answer, StreamingResponse)
    async for frame in answer.body_iterator:
        assert isinstance(frame, str)
        if frame.startswith("event: state\n"):
            [state] = json.loads(frame.partition("data: ")[2])
            yield state


async def look(page: Page) -> bytes:
    response = await page.page(request())
    assert response.status_code == 200
    return bytes(response.body)


async def look_at_once(page: Page) -> set[bytes]:
    """The pages of many who look at the same time: equal ones count once."""
    return set(await asyncio.gather(*(look(page) for _ in range(VIEWERS))))


@pytest.fixture
def hand(tmp_path):
    service = opened(tmp_path / "run")
    hand = Hand(service, "m")
    hand.work(1)
    yield hand
    service.close()


@pytest.fixture
def page(hand, tmp_path):  # noqa: ARG001 - the run has begun
    return Page(lambda: read_runs([tmp_path / "run"]))


def test_the_page_is_rendered_once_for_all_who_look_and_again_when_it_has_changed(hand, page, monkeypatch):
    renderings, data = Count(monkeypatch, "render_report"), Count(monkeypatch, "page_data")

    async def course() -> None:
        first = await look_at_once(page)
        assert first == await look_at_once(page) and len(first) == 1
        assert (renderings.calls, data.calls) == (1, 1)
        frames = data_frames(await page.events(request("seen=-1")))
        await anext(frames)
        hand.work(2)
        async with asyncio.timeout(LIMIT_S):
            await anext(frames)
        second = await look_at_once(page)
        assert len(second) == 1 and second != first
        assert renderings.calls == 2

    asyncio.run(course())


def test_the_data_and_its_changes_are_made_and_encoded_once_for_all_who_look(hand, page, monkeypatch):
    data, changes, encodings = (Count(monkeypatch, name) for name in ("page_data", "differences", "as_json"))

    async def course() -> None:
        streams = [data_frames(await page.events(request("seen=-1"))) for _ in range(VIEWERS)]
        everything = {await anext(stream) for stream in streams}
        assert len(streams) == VIEWERS and len(everything) == 1
        assert (data.calls, changes.calls, encodings.calls) == (1, 0, 1)
        hand.work(2)
        async with asyncio.timeout(LIMIT_S):
            news = set(await asyncio.gather(*(anext(stream) for stream in streams)))
        assert len(news) == 1
        (whole,), (change,) = everything, news
        assert "\nevent: change\n" in change and len(change) < len(whole) / 2
        assert (data.calls, changes.calls) == (2, 1) and encodings.calls <= 3

    asyncio.run(course())


def test_the_state_comes_at_once_again_when_it_changes_and_as_a_sign_of_life(hand, page, monkeypatch):
    """Also if no file of the run grows."""
    monkeypatch.setattr(live, "SIGN_OF_LIFE_S", 0.05)

    async def course() -> None:
        stream = states(await page.events(request("seen=-1")))
        async with asyncio.timeout(LIMIT_S):
            first = await anext(stream)
            assert (first["kind"], first["arrivals"], first["planned"]) == ("going", 1, 20)
            assert await anext(stream) == first
            hand.service.pauses.pause("the room is hot")
            while (state := await anext(stream))["kind"] != "paused":
                assert state["kind"] == "going"
            assert state["reason"] == "the room is hot"
            hand.service.admin.stop("enough for today")
            hand.service.close()
            while (state := await anext(stream))["kind"] != "stopped":
                assert state["kind"] == "paused"
            assert state["reason"] == "enough for today"

    asyncio.run(course())


class FailsAt(Count):
    """A function that fails at its second call."""

    def __call__(self, *values: Any, **options: Any) -> Any:
        if self.calls == 1:
            self.calls += 1
            raise MemoryError
        return super().__call__(*values, **options)


def test_what_could_not_be_shown_is_shown_later_also_if_nothing_more_is_added(hand, page, monkeypatch, caplog):
    data = FailsAt(monkeypatch, "page_data")

    async def course() -> None:
        frames = data_frames(await page.events(request("seen=-1")))
        await anext(frames)
        hand.work(2)
        async with asyncio.timeout(LIMIT_S):
            assert "\nevent: change\n" in await anext(frames)
        assert data.calls == 3

    asyncio.run(course())
    assert "could not be brought up to date" in caplog.text
