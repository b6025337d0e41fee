"""The two ways a run ends early, each with a sentence for the person who reads it."""


class UserError(ValueError):
    """An error that the user can fix. The message names the cause and the remedy. The command line prints it and exits with 2."""


class DiskError(UserError):
    """A file could not be written, because the disk is full or does not allow it."""


class RunStopped(RuntimeError):
    """The run cannot continue, for example because every contribution is refused. Its results are
    kept. The command line exits with 2."""


def nearest(name: str, choices: "list[str] | tuple[str, ...]") -> str:
    """ "did you mean …?" with the closest of the choices, or the list of all choices."""
    import difflib

    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(choices)}."
