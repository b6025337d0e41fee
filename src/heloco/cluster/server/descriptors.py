"""What the process that serves a run can run out of: how many file descriptors it may use, and which
errors mean that descriptors, threads or memory are short for the moment."""

import contextlib
import errno
import sys

from heloco.disk import SCARCE

DESCRIPTOR_TARGETS = (1 << 16, 10_240, 4096)
"""The first is more than any run needs. Some systems name a hard limit that they do not honour, so
fewer are asked for then."""
_RAN_OUT = (*SCARCE, errno.ENOBUFS)
_NO_THREAD = "can't start new thread"


def descriptor_limit() -> int:
    """How many files this process may have open."""
    if sys.platform == "win32":
        return DESCRIPTOR_TARGETS[0]
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return DESCRIPTOR_TARGETS[0] if soft == resource.RLIM_INFINITY else soft


def raise_descriptor_limit() -> None:
    """Raises the soft limit as far as the hard limit allows. Every connection takes a descriptor, and the
    usual soft limit is 1,024."""
    if sys.platform == "win32":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for target in DESCRIPTOR_TARGETS:
        limit = target if hard == resource.RLIM_INFINITY else min(hard, target)
        if limit > descriptor_limit():
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def has_run_out(error: BaseException) -> bool:
    """Whether a request failed because descriptors, threads or memory were short: the same request may
    succeed a moment later."""
    if isinstance(error, OSError):
        return error.errno in _RAN_OUT
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and str(error) == _NO_THREAD)
