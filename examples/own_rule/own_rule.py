"""An outer rule of one's own. As a script it is compared with a built-in one; installed, every command knows it as `sign`.

python own_rule.py
pip install . && heloco train --method sign
"""

from torch import Tensor

import heloco


def sign_step(
    theta: Tensor, m: Tensor, delta: Tensor, rho: float, *, lr: float = 0.002, momentum: float = 0.9
) -> tuple[Tensor, Tensor]:
    """Signed momentum: m ← μm + (1−μ)ρΔ,  θ ← θ − η sign(m)."""
    m = momentum * m + (1 - momentum) * rho * delta
    return theta - lr * m.sign(), m


if __name__ == "__main__":
    heloco.register_method("sign", sign_step)
    for method in ("sign", "heloco-ramp"):
        print(method, heloco.simulate(method=method, paces=[1, 1, 2, 3, 6], arrivals=40).loss)
