"""The two ways a run ends early, each with a sentence for the person who reads it."""


class UserError(ValueError):
    """Something the user can fix: the message names the cause and the remedy. The command line prints it and exits with 2."""


class RunStopped(RuntimeError):
    """The run itself cannot go on (every contribution refused, for one). What was done is kept; the command line exits with 2."""


def nearest(name: str, choices: "list[str] | tuple[str, ...]") -> str:
    """', did you mean …?' for the closest known name, or the list of them."""
    import difflib

    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(choices)}."
