"""The lock that a process holds on a run's folder while it writes there, and whether one does."""

import os
import threading
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

ATTEMPTS, PAUSE_S = 20, 0.01
"""How often a lock is tried to be taken, and how long between two attempts. Whoever looks whether it is held holds it for an
instant."""


def lock_folder(descriptor: int) -> None:
    """Locks an open folder until its descriptor is closed. Raises BlockingIOError if another process writes there."""
    for _ in range(ATTEMPTS - 1):
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            threading.Event().wait(PAUSE_S)
    return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(folder: Path) -> bool | None:
    """Whether a process of this machine writes into the folder; None if that cannot be found out."""
    if fcntl is None:
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, so that those who look do not see each other
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(descriptor)
    return False
