"""run.json: what the numbers of a run's tape refer to."""

import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from heloco.errors import UserError
from heloco.records.provenance import Provenance

EXTERNAL = "external"
"""The task digest of a run whose model and data are the machines' own."""
Count = Annotated[int, Meta(ge=1)]
Size = Annotated[int, Meta(ge=0)]


class ShardFacts(Struct, frozen=True):
    """A shard of the data."""

    name: str
    windows: int


class BlockFacts(Struct, frozen=True):
    """A parameter tensor of the model."""

    name: Annotated[str, Meta(min_length=1)]
    shape: list[Size]


def participation_window(setting: int, workers: int) -> int:
    """The number of last arrivals over which it is counted who participates: the setting, or four rounds of all workers."""
    return setting or 4 * workers


class RunFacts(Struct, frozen=True, kw_only=True):
    """What does not change during a run, besides its config."""

    method: str
    paces: list[float]
    """Each worker's pace in seconds per inner step, as the config says. The paces of real machines are measured instead."""
    unit: str
    """What the task counts: tokens or samples."""
    task_digest: str
    """Identifies the data; `EXTERNAL` if only the machines know it."""
    config_digest: str
    threads: Count
    """The number of threads that computed a simulation's inner steps; their last bits depend on it."""
    shards: list[ShardFacts]
    blocks: list[BlockFacts]
    buffers: list[str]
    tied: dict[str, str]
    """Further name of a block -> its name in `blocks`."""
    clock: Literal["virtual", "real"] = "virtual"
    format: int = 1
    heloco: str = ""
    torch: str = ""
    kernels: str = ""
    execution: Literal["", "stacked", "sequential"] = ""
    """How a simulation computed the rounds under way: as one stack of models, or one after the other. Empty: the run is of real
    machines, or of a version that did not say."""
    device: str = ""
    """What computed a simulation: cpu, or the name of the GPU."""
    precision: str = ""
    """To what a simulation rounded the operands of products: fp32 (not at all), tf32 or bf16."""
    deterministic: bool = False
    """Whether a simulation used deterministic algorithms alone, where torch has them."""
    plugins: dict[str, str] = {}
    """What the config names from other packages, such as "method mine" -> the package that brings it."""
    parameters: int = 0
    model_digest: str = ""
    """Identifies what describes the model outside of the run's config, such as a config.json; empty if nothing does."""
    passing_buffers: list[str] = []
    """The names of buffers that the model's state_dict does not hold."""
    dtypes: list[str] = []
    """The dtype of each block, if machines brought the model; empty: all are float32."""

    @property
    def is_real(self) -> bool:
        """Whether real machines did the run: then times are real, too."""
        return self.clock == "real"

    @property
    def provenance(self) -> Provenance | None:
        """What computed a simulation; None for a run of real machines."""
        return Provenance(device=self.device, precision=self.precision, torch=self.torch) if self.device else None

    @property
    def is_external(self) -> bool:
        """Whether model and data are the machines' own: then nothing is evaluated."""
        return self.task_digest == EXTERNAL

    def to_json(self) -> bytes:
        """The content of run.json. Facts that could not be read again are a `UserError`."""
        try:
            content = msgspec.json.encode(self)
            msgspec.json.decode(content, type=RunFacts)
        except (TypeError, msgspec.ValidationError) as error:
            raise UserError(f"The task or the model cannot be described: {error}.") from error
        return msgspec.json.format(content, indent=1)


def read_facts(path: Path) -> RunFacts:
    """The facts in a run.json. What is wrong with the file is a `UserError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunFacts)
    except msgspec.ValidationError as error:
        raise edited_error(path, error) from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): restore it, or start the run again.") from error


def edited_error(source: Path | str, error: msgspec.ValidationError) -> UserError:
    """The refusal of a file whose values do not fit their types. It names the file and the field."""
    field = re.search(r"(?:\$\.|field `)([\w.]+)", str(error))
    return UserError(f"{source} was edited{f' at {field[1]}' if field else ''} ({error}): restore it, or start the run again.")
