"""`heloco.join`: three lines bring an existing training loop into a run."""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from heloco.cluster.client.joined_loop import JoinedLoop
from heloco.cluster.client.loop_options import ModelScorer, Options
from heloco.errors import UserError

if TYPE_CHECKING:
    from heloco.cluster.protocol.link import Link

ADDRESS = "HELOCO_ADDRESS"


def join(
    address: "str | Link | None" = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    token: str | None = None,
    name: str | None = None,
    reset_optimizer: bool = False,
    stop_at_end: bool = True,
    patience_s: float = 3600.0,
    evaluate: ModelScorer | None = None,
    tell: Callable[[str], Any] = print,
) -> "JoinedLoop":
    """A context in which the loop's model is trained together with other machines.

    address: address of the run, or a link. Default: HELOCO_ADDRESS. If that is not set, the loop trains alone as before.
    optimizer: one or several. With several, a step counts when each of them has stepped.
    token: a worker token. Default: HELOCO_TOKEN, or the content of the file named in HELOCO_TOKEN_FILE.
    name: this machine's name on the run's tape. Default: the host name. A restarted script is the same machine.
    reset_optimizer: clear the optimizer's state at every new start. By default the state is kept.
    stop_at_end: leave the block when the run has ended. If False, the loop then continues alone.
    patience_s: how long to try to reach a run that is out of reach; at most a minute before the first success.
    evaluate: a function that scores a model. With it this machine offers to score the run's model every `eval_every` arrivals,
        between two rounds: the function gets the loop's model with the run's parameters in it, and returns a loss, or losses by
        names. Then the loop's own parameters are put back.
    tell: called with a line of text for the user now and then.
    """
    options = Options(
        token=token, name=name, reset_optimizer=reset_optimizer, stop_at_end=stop_at_end, patience_s=patience_s,
        evaluate=evaluate, tell=tell,
    )  # fmt: skip
    if isinstance(address, nn.Module):
        raise UserError("heloco.join takes the address first: heloco.join(address, model, optimizer), or model=…, optimizer=….")
    address = address or os.environ.get(ADDRESS) or None
    if address is None:
        return JoinedLoop(None, nn.Module(), [], options)
    if model is None or optimizer is None:
        raise UserError("To join a run, heloco.join needs the model and its optimizer: heloco.join(address, model, optimizer).")
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    return JoinedLoop(address, model, [_hookable(each) for each in optimizers], options)


def _hookable(optimizer: Any) -> Optimizer:
    """The torch optimizer itself. accelerate's wrapper passes each step on to it, but cannot be hooked."""
    while hasattr(optimizer, "optimizer") and type(optimizer).__module__.partition(".")[0] == "accelerate":
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        raise UserError(f"{type(optimizer).__name__} is not a torch optimizer: give the one that steps the model.")
    return optimizer
