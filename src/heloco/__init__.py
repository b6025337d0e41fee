"""HeLoCo: asynchronous low-communication training of one model on unequal machines with unequal data.

    outer = heloco.HeLoCo(model.parameters(), lr=0.7, momentum=0.9)
    result = heloco.simulate(method="heloco-ramp", paces=[1, 1, 6, 6, 6])

    with heloco.join(address, model, optimizer):  # any training loop takes part in a run on real machines
        ...

Names are imported when they are first used, so that tools that only read a tape need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "HeLoCo": "heloco.outer",
    "MLA": "heloco.outer",
    "Nesterov": "heloco.outer",
    "DelayedNesterov": "heloco.outer",
    "OuterOptimizer": "heloco.outer",
    "Outcome": "heloco.outer",
    "NotFinite": "heloco.outer",
    "correct": "heloco.outer",
    "examine": "heloco.outer",
    "METHODS": "heloco.methods",
    "Method": "heloco.methods",
    "register_method": "heloco.methods",
    "register_weight": "heloco.policy",
    "register_shards": "heloco.policy",
    "register_task": "heloco.task",
    "register_inner_optimizer": "heloco.inner",
    "Knob": "heloco.knobs",
    "Round": "heloco.synchronizer",
    "Contribution": "heloco.synchronizer",
    "Arrival": "heloco.synchronizer",
    "Synchronizer": "heloco.synchronizer",
    "Simulation": "heloco.engine.simulation",
    "simulate": "heloco.engine.simulate",
    "Result": "heloco.engine.simulate",
    "load_run": "heloco.report.run_data",
    "RunData": "heloco.report.run_data",
    "load_study": "heloco.study.study_data",
    "StudyData": "heloco.study.study_data",
    "join": "heloco.cluster.client.join_own_loop",
    "JoinedLoop": "heloco.cluster.client.joined_loop",
    "HeLoCoCallback": "heloco.cluster.client.hf_callback",
    "HeLoCoLightningCallback": "heloco.cluster.client.lightning_callback",
    "Task": "heloco.task",
    "DatasetTask": "heloco.task.datasets",
    "UserError": "heloco.errors",
    "RunStopped": "heloco.errors",
}

__all__ = [*_HOME, "__version__"]

if TYPE_CHECKING:
    from heloco.cluster.client.hf_callback import HeLoCoCallback as HeLoCoCallback
    from heloco.cluster.client.join_own_loop import join as join
    from heloco.cluster.client.joined_loop import JoinedLoop as JoinedLoop
    from heloco.cluster.client.lightning_callback import HeLoCoLightningCallback as HeLoCoLightningCallback
    from heloco.engine.simulate import Result as Result
    from heloco.engine.simulate import simulate as simulate
    from heloco.engine.simulation import Simulation as Simulation
    from heloco.errors import RunStopped as RunStopped
    from heloco.errors import UserError as UserError
    from heloco.inner import register_inner_optimizer as register_inner_optimizer
    from heloco.knobs import Knob as Knob
    from heloco.methods import METHODS as METHODS
    from heloco.methods import Method as Method
    from heloco.methods import register_method as register_method
    from heloco.outer import MLA as MLA
    from heloco.outer import DelayedNesterov as DelayedNesterov
    from heloco.outer import HeLoCo as HeLoCo
    from heloco.outer import Nesterov as Nesterov
    from heloco.outer import NotFinite as NotFinite
    from heloco.outer import Outcome as Outcome
    from heloco.outer import OuterOptimizer as OuterOptimizer
    from heloco.outer import correct as correct
    from heloco.outer import examine as examine
    from heloco.policy import register_shards as register_shards
    from heloco.policy import register_weight as register_weight
    from heloco.report.run_data import RunData as RunData
    from heloco.report.run_data import load_run as load_run
    from heloco.study.study_data import StudyData as StudyData
    from heloco.study.study_data import load_study as load_study
    from heloco.synchronizer import Arrival as Arrival
    from heloco.synchronizer import Contribution as Contribution
    from heloco.synchronizer import Round as Round
    from heloco.synchronizer import Synchronizer as Synchronizer
    from heloco.task import Task as Task
    from heloco.task import register_task as register_task
    from heloco.task.datasets import DatasetTask as DatasetTask


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'heloco' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
