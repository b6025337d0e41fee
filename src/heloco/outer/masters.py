"""Parameters in half precision: the outer rule moves a float32 master of each, and the parameter is its rounding.

An outer step is small compared with the parameter. Near 1 the numbers of bfloat16 lie 2⁻⁷ apart, so a hundred steps of 10⁻³
would leave a parameter where it is; its master moves by their sum.
"""

from typing import Any

import torch
from torch import Tensor


def master_of(parameter: Tensor, state: dict[str, Any]) -> Tensor:
    """The float32 tensor that stands for a half-precision parameter, from the parameter's state; at first with its values."""
    if "master" not in state:
        state["master"] = parameter.detach().to(torch.float32, copy=True)
    master: Tensor = state["master"]
    return master


def round_masters(parameters: list[Tensor], masters: list[Tensor]) -> None:
    """Writes the masters into the parameters; where a parameter is its own master there is nothing to do."""
    pairs = [(p, master) for p, master in zip(parameters, masters, strict=True) if p is not master]
    if pairs:
        torch._foreach_copy_([p for p, _ in pairs], [master for _, master in pairs])
