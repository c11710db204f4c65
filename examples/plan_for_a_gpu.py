"""Plan a network for GPUs that this machine does not have: kernels, floors and estimates."""

import onchip
from onchip.plan.kernel import Job
from onchip.runtime.placement import plan

net = onchip.mlp(128, 128, 128, 128, 3)
for device in ("rtx3080ti", "a100", "h200"):
    planned = plan(net, device, Job("fp16", batch=1 << 20))
    floor, estimate = planned.floor_at(1 << 20), planned.estimate_at(1 << 20)
    kernels = ", ".join(group.claim.label for group in planned.groups)
    print(f"{planned.device.name}: {kernels}; 2^20 rows: floor {floor:.0f} µs, estimate {estimate:.0f} µs")
