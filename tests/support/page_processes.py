"""The processes that draw live pages."""

from pathlib import Path


def page_processes(folder: Path) -> list[int]:
    """Ids of processes that show this run's page."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"heloco.report.page_process" in arguments and str(folder).encode() in arguments:
            pids.append(int(entry.name))
    return pids
