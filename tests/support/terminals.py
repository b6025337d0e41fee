"""A terminal of a given width, and what a command draws in it."""

import os
import pty
import re
import sys
from pathlib import Path


def on_a_terminal(*arguments: str | Path, columns: int = 110) -> tuple[int, str]:
    """Runs `heloco` with a pseudo-terminal for its output; its exit code and all it drew."""
    pid, terminal = pty.fork()
    if not pid:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": str(columns), "LINES": "40"}
        os.execve(sys.executable, [sys.executable, "-m", "heloco.cli", *map(str, arguments)], environment)
    drawn = b""
    while True:
        try:
            chunk = os.read(terminal, 65536)
        except OSError:  # how Linux tells that the other end is closed
            break
        if not chunk:
            break
        drawn += chunk
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    return os.waitstatus_to_exitcode(status), drawn.decode()


def without_colours(drawn: str) -> str:
    """What was drawn, without the terminal's escape sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn).replace("\r", "")
