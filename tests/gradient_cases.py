"""Cases of layers for tests of gradients: those of layer_cases.py, and shapes that matter to gradients only."""

from layer_cases import CASES, Case
from onchip.network.layers import Ceil, Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d, Floor, Linear, Round, Sign

MORE = [
    Case(Linear(), ((2, 3, 5),), {"weight": (4, 5), "bias": (4,)}),
    Case(Linear(), ((1,),), {"weight": (1, 1), "bias": (1,)}),
    # Elements at the end of x that no window reads, along one axis or both.
    Case(Conv1d((3,), (1, 0)), ((2, 10),), {"weight": (3, 2, 2), "bias": (3,)}),
    Case(Conv1d((4,)), ((2, 7),), {"weight": (3, 2, 2)}),
    Case(Conv2d((2, 3), (1, 1, 0, 0), (2, 1), 2), ((4, 8, 9),), {"weight": (6, 2, 3, 2), "bias": (6,)}),
    Case(Conv2d((2, 2), (3, 0, 0, 3)), ((2, 5, 6),), {"weight": (3, 2, 2, 3)}),
    Case(Conv2d(), ((2, 5, 3),), {"weight": (3, 2, 1, 1), "bias": (3,)}),
    # Output paddings: below the stride, and as long as it and longer.
    Case(ConvTranspose1d((3,), (0, 1), (2,)), ((2, 5),), {"weight": (2, 3, 2), "bias": (3,)}),
    Case(ConvTranspose1d((2,), (1, 0), (2,), (3,)), ((2, 5),), {"weight": (2, 3, 2)}),
    Case(ConvTranspose2d((1, 2), (1, 0, 0, 1), (2, 1), (3, 1), 2), ((4, 3, 5),), {"weight": (4, 2, 2, 3)}),
]  # fmt: skip
FLAT = (Ceil, Floor, Round, Sign)  # their derivative is 0: no gradient passes them
GRADIENT_CASES = [case for case in (*CASES, *MORE) if case.layer.is_differentiable and not isinstance(case.layer, FLAT)]
