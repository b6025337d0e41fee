"""A script that runs `ray start ARGUMENTS` and ends with all its processes when its parent ends, even if that is killed. Its
first argument is a folder that is then removed, or "", and its second the module with Ray's command line.

It is run by its path and imports nothing from heloco, because Ray's start-up alone is slow enough.
"""

import importlib
import os
import shutil
import signal
import sys
import threading

parent_ended = threading.Event()


def end_with_parent() -> None:
    """Waits until the parent has ended, and then ends this process as SIGTERM does."""
    sys.stdin.buffer.read()  # only the parent has the other end of this pipe, so it closes when the parent ends
    parent_ended.set()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    _, folder, command, *arguments = sys.argv
    main = importlib.import_module(command).main
    sys.argv = ["ray", "start", *arguments]
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        main()
    finally:
        if parent_ended.is_set() and folder:
            shutil.rmtree(folder, ignore_errors=True)
