"""How far the whole run is, for a loop that is one of several machines in it."""


class RunProgress:
    """The run says how far it is when a round begins. Between two rounds it is estimated from the loop's own steps: from what
    they gained since the loop joined, or in the first round from what they would gain if all workers were equally fast."""

    def __init__(self) -> None:
        self.share = 0.0
        """How much of the run is done, from 0 to 1. It never falls."""
        self.arrivals = self.planned_arrivals = 0
        self._steps = self._steps_before = 0
        self._done = 0.0
        self._joined_at: tuple[float, int] | None = None
        self._per_step = 0.0

    def begin_round(self, done: float, *, planned_arrivals: int, seats: int, inner_steps: int) -> None:
        """A round begins, and this much of the run is done."""
        if self._joined_at is None:
            self._joined_at = done, self._steps
        done_before, steps_before = self._joined_at
        gained, steps = done - done_before, self._steps - steps_before
        self._per_step = gained / steps if gained > 0 and steps > 0 else seats / (planned_arrivals * inner_steps)
        self._done, self._steps_before = done, self._steps
        self.arrivals, self.planned_arrivals = round(done * planned_arrivals), planned_arrivals
        self._estimate()

    def note_step(self) -> None:
        """The loop made a step."""
        self._steps += 1
        self._estimate()

    def end(self) -> None:
        """The run has ended."""
        self.share, self._done, self._per_step = 1.0, 1.0, 0.0

    @property
    def steps_left(self) -> int:
        """About how many steps this loop will still make."""
        return round((1 - self.share) / self._per_step) if self._per_step else 0

    def _estimate(self) -> None:
        estimate = self._done + (self._steps - self._steps_before) * self._per_step
        self.share = max(self.share, min(1.0, estimate))
