"""The registries, restored after a test."""

from collections.abc import Iterator
from typing import Any

import pytest

from heloco.inner import INNER_OPTIMIZERS
from heloco.methods import METHODS
from heloco.policy import SHARD_POLICIES, WEIGHTS
from heloco.registry import Registry
from heloco.task import TASKS


@pytest.fixture
def nothing_stays_registered() -> Iterator[None]:
    registries: list[Registry[Any]] = [METHODS, WEIGHTS, SHARD_POLICIES, TASKS, INNER_OPTIMIZERS]
    before = [dict(registry.registered) for registry in registries]
    yield
    for registry, items in zip(registries, before, strict=True):
        registry.registered = items
