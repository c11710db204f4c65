"""Cases of layers for tests of gradients: those of layer_cases.py, and shapes that matter to gradients only."""

from layer_cases import CASES, Case
from onchip.network.layers import (
    Add,
    Ceil,
    Comparison,
    Concat,
    Conv1d,
    Conv2d,
    ConvTranspose1d,
    ConvTranspose2d,
    Div,
    Floor,
    Gather,
    Interleave,
    Linear,
    Mask,
    Max,
    Min,
    Mul,
    NearestResize,
    Pad,
    Pow,
    PReLU,
    Round,
    Sign,
    Slice,
    Sub,
    Tile,
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
    # Selections: of runs, of some elements once, of others twice, of all in another order; a few times, and too often.
    Case(Slice((1, 0, 2), (2, 3, 2), (1, 1, -2)), ((4, 3, 6),)),
    Case(Pad((-1, 2, 3, -1)), ((5, 4),)),
    *(Case(Gather(1, indices), ((4, 2),)) for indices in ((3, 0, 2), (1, 0, 3, 2), (2,) * 4, (2,) * 6)),
    Case(Pad((1, 2, 0, 1), "reflect"), ((3, 4),)),
    Case(Tile((2, 3)), ((2, 3),)),
    Case(NearestResize((2, 6, 12), (1.0, 2.0, 3.0)), ((2, 3, 4),)),
    Case(NearestResize((2, 3), (0.5, 1.0)), ((4, 3),)),
    Case(NearestResize((7,), (3.5,), rounding="floor"), ((2,),)),
    Case(Interleave((2, 1)), ((2, 3, 2), (2, 2, 2))),
    Case(Concat(2), ((3, 1), (3, 4)), reads=(1, 0, 1)),
]  # fmt: skip
FLAT = (Ceil, Comparison, Floor, Round, Sign)  # their derivative is 0: no gradient passes them
GRADIENT_CASES = [case for case in (*CASES, *MORE) if case.layer.is_differentiable and not isinstance(case.layer, FLAT)]
