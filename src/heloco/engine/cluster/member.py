"""A machine's side of a run: it joins, gives signs of life, takes rounds, hands in, and comes back by itself after a cut."""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from heloco.engine.cluster.link import Denied, Key, Link, LinkDown
from heloco.errors import RunStopped, UserError
from heloco.run.tensors import Layout

T = TypeVar("T")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
POLL_S = 10.0
FINAL_TRIES = 3


class Ended(Exception):
    """The run is over; the text says why."""


class Stopped(Exception):
    """This machine was asked to stop while the run could not be reached."""


class NotHeld(Exception):
    """The round is not this machine's any more: it goes on with a fresh one."""


@dataclass(frozen=True)
class Taken:
    """A round that this machine holds."""

    key: Key
    shard: int
    spans: tuple[tuple[int, int], ...]
    inner_steps: int
    shard_steps: int
    run_steps: float
    start: dict[str, Tensor]


class Member:
    def __init__(
        self,
        link: Link,
        name: str,
        *,
        layout: Layout | None = None,
        pace_s: float | None = None,
        patience_s: float = 3600.0,
        returning: str | None = None,
        stopping: Callable[[], Any] = lambda: False,
        tell: Callable[[str], Any] = print,
    ) -> None:
        """`layout`: of the machine's own model, where it brings one. `patience_s`: how long to try to reach the run again."""
        self.link, self.name, self.layout, self.pace_s = link, name, layout, pace_s
        self.patience_s, self.stopping, self.tell = patience_s, stopping, tell
        self.machine = returning
        """The id that the run knows this machine by."""
        self.steps = 0
        self.ended = ""
        self.doomed = ""
        """Why the present round is not worth going on with."""
        self.waiting = ""
        """Why there is no round at the moment."""
        self.joined: dict[str, Any] = {}
        self._holding: Key | None = None
        self._lock = threading.Lock()
        self._leaving = threading.Event()
        self._beats: threading.Thread | None = None

    # ---- coming and going

    def describe(self) -> dict[str, Any]:
        """What there is to join."""
        return self._patiently(self.link.describe)

    def join(self) -> dict[str, Any]:
        self._enter()
        self._beats = threading.Thread(target=self._beat, name="heloco-beats", daemon=True)
        self._beats.start()
        return self.joined

    def _enter(self) -> None:
        """Joins, or comes back."""
        try:
            self.joined = self._patiently(self._join)
        except Denied as error:
            if error.name != "ended":
                raise
            self.ended = str(error)
            raise Ended(str(error)) from None

    def _join(self) -> dict[str, Any]:
        answer = self.link.join(self.name, returning=self.machine, pace_s=self.pace_s, layout=self.layout)
        self.machine = answer["machine"]
        return answer

    @property
    def seat(self) -> int | None:
        seat: int | None = self.joined.get("seat")
        return seat

    def leave(self, reason: str = "it left") -> None:
        """Tells the run, if that can be reached at once."""
        self._leaving.set()
        if self._beats is not None:
            self._beats.join(timeout=10)
        if self.machine is not None:  # after the end too: then it is known that nobody needs the run's model any more
            with contextlib.suppress(LinkDown, Denied):  # then it will notice
                self.link.leave(self.machine, reason)
        self.link.close()

    def send_model(self, layout: Layout, tensors: Mapping[str, Tensor], names: list[str]) -> None:
        """The model a run begins with, if nobody else has sent it first."""
        try:
            self._asked(lambda machine: self.link.send_model(machine, layout, tensors, names))
        except Denied as error:
            if error.name != "has-model":
                raise

    # ---- rounds

    def take(self, stopping: Callable[[], bool] = lambda: False) -> Taken | None:
        """The next round; None where `stopping` says so first."""
        while not stopping():
            answer = self._asked(lambda machine: self.link.next_round(machine, min(POLL_S, self.joined["beat_s"] * 2)))
            self.waiting = answer.get("wait", "")
            if self.waiting:
                continue
            if "layout" not in self.joined or self.joined["layout"] is None:  # the model came after this machine
                self._enter()
            key = (answer["worker"], answer["round"], answer["version"])
            self._hold(key)
            try:
                start = self._fetch(key)
            except NotHeld:
                continue
            spans = tuple((first, count) for first, count in answer["spans"])
            numbers = (answer["inner_steps"], answer["shard_steps"], answer["run_steps"])
            return Taken(key, answer["shard"], spans, *numbers, start)
        return None

    def _fetch(self, key: Key) -> dict[str, Tensor]:
        layout = Layout.from_json(self.joined["layout"])
        return self._asked(lambda machine: self.link.fetch(machine, key, layout))

    def _hold(self, key: Key | None) -> None:
        with self._lock:
            self.steps, self.doomed, self._holding = 0, "", key

    def hand_in(self, key: Key, tensors: Mapping[str, Tensor], report: dict[str, Any]) -> dict[str, Any]:
        """Sends the contribution until it is acknowledged. `NotHeld`: it came too late, or was refused."""
        layout = Layout.from_json(self.joined["contribution"])
        try:
            return self._asked(lambda machine: self.link.hand_in(machine, key, layout, tensors, report))
        finally:
            self._hold(None)

    def final(self) -> dict[str, Tensor] | None:
        """The model of a run that has ended; None where it cannot be had any more: nobody waits long for that."""
        assert self.machine is not None
        key, layout = (self.joined["seats"], 0, 0), Layout.from_json(self.joined["layout"])
        for _ in range(FINAL_TRIES):
            try:
                return self.link.fetch(self.machine, key, layout)
            except LinkDown:
                self._leaving.wait(FIRST_PAUSE_S)
            except (Denied, UserError, RunStopped):
                break
        return None

    def abandon(self, reason: str) -> None:
        with contextlib.suppress(NotHeld):
            self._asked(lambda machine: self.link.abandon(machine, reason))
        self._hold(None)

    # ---- asking, again where that is right

    def _asked(self, ask: Callable[[str], T]) -> T:
        def once() -> T:
            assert self.machine is not None
            return ask(self.machine)

        while True:
            try:
                return self._patiently(once)
            except Denied as error:
                if error.name == "ended":
                    self.ended = str(error)
                    raise Ended(str(error)) from None
                if error.name in ("not-held", "not-finite"):
                    self._hold(None)
                    raise NotHeld(str(error)) from None
                if error.name in ("offset", "incomplete", "corrupted"):
                    continue  # the next try goes on from what is there
                if error.name == "unknown-machine":
                    self._enter()
                    continue
                raise

    def _patiently(self, ask: Callable[[], T]) -> T:
        """Again and again while the run cannot be reached or its disk is full, less and less often, up to a limit."""
        began, pause_s, told = time.monotonic(), FIRST_PAUSE_S, ""
        while True:
            try:
                answer = ask()
                if told:
                    self.tell("The run is back.")
                return answer
            except LinkDown as error:
                why = str(error)
            except Denied as error:
                if error.name not in ("disk", "busy", "rate"):
                    if told:
                        self.tell("The run is back.")
                    raise
                why = str(error)
            if time.monotonic() - began > self.patience_s:
                raise RunStopped(f"The run at {self.link.address} was out of reach for {self.patience_s:g} s ({why}): given up.")
            if why != told:
                self.tell(f"{why} Trying again.")
                told = why
            if self._leaving.wait(pause_s) or self.stopping():
                raise Stopped(why)
            pause_s = min(LONGEST_PAUSE_S, pause_s * 2)

    # ---- signs of life

    def _beat(self) -> None:
        while not self._leaving.wait(self.joined["beat_s"]):
            held = self._holding
            try:
                assert self.machine is not None
                answer = self.link.beat(self.machine, self.steps, self.pace_s)
            except (LinkDown, Denied):
                continue  # whoever asks next will find out
            with self._lock:
                if held is None or held != self._holding:
                    continue  # the answer is about another round
                if answer["ended"]:
                    self.doomed = f"the run has ended: {answer['ended']}"
                elif answer["stale"]:
                    self.doomed = "its contribution would come too late to be used"
                elif tuple(answer["round"] or ()) != held:
                    self.doomed = "it was given to another machine"
