"""What a real run's journal tells beside its tape: pauses and their reasons, who left, contributions that held no numbers."""

from dataclasses import dataclass, field

from heloco.report.summary import Record, name_of

JOURNAL = "journal/events.jsonl"
NOT_FINITE = "the pseudo-gradient holds NaN or Inf"
"""The reason of a round that was given up because of what was handed in: such a contribution is not on the tape."""
FOR_SOME = "contributed to the last"
"""In the reason of a pause in which rounds are still handed out, to those that have not contributed lately."""
PARTINGS = {"leave": "left", "lost": "lost", "turned-away": "turned away"}


@dataclass
class Pause:
    start_s: float
    reason: str
    end_s: float | None = None
    """None: it lasts, or the run was ended in it."""


@dataclass
class Parting:
    kind: str
    time_s: float
    reason: str


@dataclass
class Attendance:
    """Follows the journal event by event. `told` grows with what a reader would notice."""

    pauses: list[Pause] = field(default_factory=list)
    parted: dict[str, Parting] = field(default_factory=dict)
    """A machine's name -> how it went; who is here is not in it."""
    told: int = 0
    time_s: float = 0.0
    """Of the last event."""
    _holder: dict[int, str] = field(default_factory=dict)
    _here: set[str] = field(default_factory=set)

    def follow(self, event: Record) -> tuple[int, str] | None:
        """Takes an event in. (Worker, machine) where it says that a contribution was refused that is not on the tape."""
        kind, self.time_s = event["event"], float(event["time_s"])
        if kind == "dispatch":
            self._holder[int(event["worker"])] = str(event["machine"])
            if self.paused and FOR_SOME not in self.pauses[-1].reason:  # a restart after a kill ended it without a word
                self._end_pause(self.time_s)
        elif kind == "abandon":
            machine = self._holder.pop(int(event["worker"]), None)
            if machine is not None and event["reason"] == NOT_FINITE:
                self.told += 1
                return int(event["worker"]), machine
        elif kind in ("pause", "go-on"):
            self._end_pause(self.time_s)
            if kind == "pause":
                self.pauses.append(Pause(self.time_s, str(event["reason"])))
        elif kind == "join":
            self._here.add(str(event["machine"]))
            self._notice(self.parted.pop(name_of(str(event["machine"])), None) is not None)
        elif kind in PARTINGS:
            self._part(str(event["machine"]), Parting(PARTINGS[kind], self.time_s, str(event["reason"])))
        return None

    def _part(self, machine: str, how: Parting) -> None:
        self._here.discard(machine)
        if name_of(machine) not in map(name_of, self._here):
            self.parted[name_of(machine)] = how
            self._notice(True)

    @property
    def paused(self) -> bool:
        return bool(self.pauses) and self.pauses[-1].end_s is None

    def _end_pause(self, time_s: float) -> None:
        """A pause that was begun again after a restart ends where the next one begins."""
        self._notice(True)
        if self.paused:
            self.pauses[-1].end_s = time_s

    def _notice(self, anything: bool) -> None:
        self.told += anything
