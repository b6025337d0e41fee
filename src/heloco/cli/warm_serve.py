"""`heloco serve` without Ray: the run is served by a child, and a child that dies is replaced by another at once."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from heloco.cli.flags import fail
from heloco.cli.serve import ServingChild, SynchronizerFailed, carry_on
from heloco.cli.warm_restart import START_AGAIN, WarmRestart, Wording, import_ahead
from heloco.errors import RunStopped, UserError

if TYPE_CHECKING:
    from heloco.cluster.server.process import ServeSpec

SERVING_MODULES = (
    "heloco.cluster.server.process", "heloco.task.language", "heloco.task.hf", "heloco.cluster.gateway.https_server",
    "heloco.cluster.gateway.app", "heloco.cluster.gateway.listener", "heloco.cluster.gateway.connection",
    "heloco.report.page_process", "heloco.report.page_connection", "heloco.cli.serve_view", "heloco.cli.page",
    "cryptography.x509", "cryptography.hazmat.primitives.serialization", "encodings.idna", "numpy.ma", "numpy.random", "resource",
    "heloco.uvicorn_internals",
)  # fmt: skip
"""What serving a run imports. Those that are not installed are left out; the child says what it misses."""


SERVING = Wording("The synchronizer", "it is started again from its journal", "an arrival")


def serve_in_children(spec: "ServeSpec", local: int) -> int:
    """Serves a run, with `local` workers of this machine, in a child process that is started again if it dies. Returns in the
    parent and in each child, with an exit code."""
    from heloco.records.run_files import TAPE

    import_ahead(SERVING_MODULES)
    lifeline = os.pipe() if local else None  # this process holds its other end
    tape = Path(spec.folder) / TAPE

    def serve(is_restart: bool) -> int:
        child = ServingChild(is_restart, lifeline[0] if lifeline else None)
        try:
            return carry_on(for_restart(spec) if is_restart else spec, local, "off", child)
        except (UserError, RunStopped, OSError) as error:
            if isinstance(error, SynchronizerFailed) or (is_restart and may_pass(error)):
                fail(str(error))
                return START_AGAIN
            raise

    def progress() -> int:
        return tape.stat().st_size if tape.exists() else 0

    wording = replace(SERVING, remedy=f"What was done is kept: `heloco serve {spec.folder}` goes on.")
    return WarmRestart(serve, progress, wording).run()


def for_restart(spec: "ServeSpec") -> "ServeSpec":
    """The same run for a restart: at the port that machines know."""
    from heloco.cluster.server.process import ListenConfig

    served = ListenConfig.load(Path(spec.folder))
    listen = spec.listen and replace(spec.listen, port=served.port if served else spec.listen.port)
    return replace(spec.for_restart(), listen=listen)


def may_pass(error: BaseException | None) -> bool:
    """Whether the same start may succeed later: the disk was full or failing, or descriptors or memory were short."""
    from heloco.disk import FULL, SCARCE, NotDurable

    while error is not None:
        if isinstance(error, NotDurable) or (isinstance(error, OSError) and error.errno in FULL + SCARCE):
            return True
        error = error.__cause__
    return False
