"""The definition of every layer: NumPy, one operation at a time. In float64 it is the reference of the tests.

Tests compare every engine with `forward(net, x, "float64")`; `forward(net, x, "float32")` is the naive run, whose error
is the baseline. Dtypes narrower than float32 compute in float32 and round after every operation, as hardware does. A
network's own float dtypes are ignored; see cast.py for Cast.
"""

# Importing these registers their layers.
from onchip.kernels.reference import (  # noqa: F401
    activation,
    argument,
    cast,
    combine,
    conv,
    function,
    linear,
    matmul,
    norm,
    pixels,
    pool,
    recurrent,
    resize,
    scan,
    select,
    shape,
    tokens,
)
from onchip.kernels.reference.base import BACKWARD, FORWARD
from onchip.kernels.reference.network import forward, forward_all, loss_and_gradients
from onchip.kernels.reference.training import adam_step, batch_loss, clip_gradients, sgd_step
from onchip.kernels.reference.used_weights import with_arrays, with_used_tokens

__all__ = [
    "BACKWARD", "FORWARD", "adam_step", "batch_loss", "clip_gradients", "forward", "forward_all",
    "loss_and_gradients", "sgd_step", "with_arrays", "with_used_tokens",
]  # fmt: skip
