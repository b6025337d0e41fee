"""What may become of a contribution: the words that the synchronizer decides with and the tape keeps."""

from typing import Literal

Verdict = Literal["applied", "zeroed", "skipped", "refused", "gathered"]
ArrivalCode = Literal["", "stale", "norm", "shapes", "not-finite", "buffers-not-finite"]
"""Why a contribution was not simply applied."""
