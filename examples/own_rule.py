"""An outer rule of one's own, next to a built-in one. docs/extend.md says how to use it with `heloco train` and real machines.

python examples/own_rule.py
"""

from torch import Tensor

import heloco


def sign_step(
    theta: Tensor, m: Tensor, delta: Tensor, rho: float, *, lr: float = 0.002, momentum: float = 0.9
) -> tuple[Tensor, Tensor]:
    """Signed momentum: m ← μm + (1−μ)ρΔ,  θ ← θ − η sign(m)."""
    m = momentum * m + (1 - momentum) * rho * delta
    return theta - lr * m.sign(), m


heloco.register_method("sign", sign_step)

if __name__ == "__main__":
    for method in ("sign", "heloco-ramp"):
        print(method, heloco.simulate(method=method, paces=[1, 1, 2, 3, 6], arrivals=40).loss)
