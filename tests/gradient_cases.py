"""Cases of layers for tests of gradients: those of layer_cases.py, and shapes that matter to gradients only."""

from layer_cases import CASES, Case
from onchip.network.layers import (
    GRU,
    LSTM,
    RNN,
    Add,
    Ceil,
    Comparison,
    Conv1d,
    Conv2d,
    ConvTranspose1d,
    ConvTranspose2d,
    Div,
    Floor,
    Linear,
    Mask,
    Max,
    Min,
    Mul,
    Pow,
    PReLU,
    Round,
    Sign,
    Sub,
)

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
    # Broadcast operands: of all axes, of inner and outer ones; equal operands; both signs.
    Case(Add(), ((2, 3, 4),), {"constant": (3, 1)}),
    Case(Mul(), ((2, 3, 4), (2, 1, 4), (1, 3, 1)), {"constant": (1,)}),
    Case(Sub(), ((3, 4),), {"constant": ()}),
    Case(Sub(), ((3, 1),), {"first": (4,)}),
    Case(Div(), ((2, 3), (2, 3))),
    *(Case(Max(), ((3, 4),), {"constant": shape}) for shape in ((), (3, 1))),
    Case(Max(), ((5,),), reads=(0, 0)),
    Case(Min(), ((3, 4), (3, 1))),
    Case(Mask(), ((3, 4),), {"first": ()}),
    Case(PReLU(), ((3, 4),), {"constant": (4,)}),
    Case(PReLU(), ((3, 4), (3, 1))),
    Case(PReLU(), ((3, 4),), {"first": (4,)}),
    Case(Pow(), ((3, 4),), {"constant": (1, 4)}, positive=True),
    # One step; initial states of each direction; more sequences per row.
    Case(LSTM(), ((1, 8), (1, 2), (1, 2)), {"recurrence": (1, 8, 2)}),
    Case(LSTM("reverse"), ((2, 3, 8), (2, 1, 2)), {"recurrence": (1, 8, 2)}),
    Case(LSTM("bidirectional", "cell"), ((3, 16), (2, 2), (2, 2)), {"recurrence": (2, 8, 2)}),
    Case(GRU("bidirectional", "last", False), ((4, 12), (2, 2)), {"recurrence": (2, 6, 2)}),
    Case(GRU("reverse", "last"), ((3, 6), (1, 2)), {"recurrence": (1, 6, 2), "bias": (1, 2)}),
    Case(GRU(reset_after=False), ((1, 6),), {"recurrence": (1, 6, 2)}),
    Case(GRU("bidirectional", "last"), ((2, 3, 12),), {"recurrence": (2, 6, 2)}),
    Case(RNN("bidirectional", "last"), ((2, 2, 6), (2, 2, 3)), {"recurrence": (2, 3, 3)}),
]  # fmt: skip
FLAT = (Ceil, Comparison, Floor, Round, Sign)  # their derivative is 0: no gradient passes them
GRADIENT_CASES = [case for case in (*CASES, *MORE) if case.layer.is_differentiable and not isinstance(case.layer, FLAT)]
