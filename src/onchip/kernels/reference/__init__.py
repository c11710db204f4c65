"""Networks in NumPy, one layer at a time, by its `forward` and `backward`. In float64 it is the reference of the tests.

Tests compare every engine with `forward(net, x, "float64")`; `forward(net, x, "float32")` is the naive run, whose error
is the baseline. Dtypes narrower than float32 compute in float32 and round after every operation, as hardware does. A
network's own float dtypes are ignored: in float64 a Cast between floats is the identity.
"""

from onchip.kernels.reference.network import forward, forward_all, loss_and_gradients, run_step
from onchip.kernels.reference.training import adam_step, batch_loss, clip_gradients, sgd_step
from onchip.kernels.reference.used_weights import with_arrays, with_used_tokens

__all__ = [
    "adam_step", "batch_loss", "clip_gradients", "forward", "forward_all",
    "loss_and_gradients", "run_step", "sgd_step", "with_arrays", "with_used_tokens",
]  # fmt: skip
