"""A script: `ray start ARGUMENTS` that ends, with all that it started, when whoever started it has ended, however that came. Its
first argument is the folder that is removed then; "" if there is none.

It is run by its path and imports nothing of heloco: Ray's start-up alone is slow enough.
"""

import importlib
import os
import shutil
import signal
import sys
import threading

parent_ended = threading.Event()


def end_with_parent() -> None:
    sys.stdin.buffer.read()  # the other end of this pipe is the parent's alone: it closes with the parent, even killed
    parent_ended.set()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main = importlib.import_module("ray.scripts.scripts").main
    _, folder, *arguments = sys.argv
    sys.argv = ["ray", "start", *arguments]
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        main()
    finally:
        if parent_ended.is_set() and folder:
            shutil.rmtree(folder, ignore_errors=True)
