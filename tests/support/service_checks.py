"""What tests of the service check: refusals by name, and a state that did not change."""

import pytest

from heloco.cluster.protocol.refusals import Refused
from support.runs import tape


def refuses(code, ask, *arguments, **options):
    """The request is refused with that code, and a sentence."""
    with pytest.raises(Refused) as refused:
        ask(*arguments, **options)
    assert refused.value.code == code, refused.value
    assert refused.value.text
    return refused.value


def state(service):
    run = service.state.run
    return run.digest(), run.synchronizer.arrivals, dict(run.synchronizer.rounds_under_way), len(tape(service.state.folder))
