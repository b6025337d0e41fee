"""On the GPU: table rows without a gradient in one launch, against torch in float64."""
import torch
from heloco.inner import InnerOptions
from heloco.inner.adamw import adamw_factors, settings_of, without_gradient
p, m, v = (torch.randn(50257, 128, device="cuda") for _ in range(3))
m *= 1e-3; v = (v * 1e-3).square(); v[:100] = 0; m[:100] = 0
n = 80
steps = torch.arange(81.0, 81 + n, dtype=torch.float64, device="cuda")
f = adamw_factors(steps, torch.full_like(steps, 4e-4), torch.ones_like(steps), torch.tensor(settings_of(InnerOptions()), dtype=torch.float64, device="cuda")[:, None].expand(4, n))
for _ in range(3):
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record(); got = without_gradient(p, m, v, f); b.record(); b.synchronize()
    print("ms", a.elapsed_time(b))
want = without_gradient(p.double(), m.double(), v.double(), f)
for x, y, s in zip(got, want, (p, m, v)):
    off = ((x - y).norm() / (y - s.double()).norm()).item()
    print("off", off)
    assert off < 1e-3 and torch.isfinite(x).all()
