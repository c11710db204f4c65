"""The header common/layers.cuh, generated when a kernel is compiled: a C++ struct per elementwise layer, from its
expressions."""

from __future__ import annotations

from onchip.kernels.pointwise import CODES, GRADIENTS, OPERATIONS, Operation
from onchip.network.layers import BUILT_IN, Activation

HEADER = "common/layers.cuh"
_OF_USERS: dict[str, Operation] = {}  # by struct


def struct_of(op: Operation) -> str:
    """The name of the operation's struct, for a name expression; layers_header then knows a user's layer."""
    if op.layer not in BUILT_IN:
        _OF_USERS[op.struct] = op
    return op.struct


def layers_header(name_expression: str) -> str:
    """The header of a program. It contains the structs of gradients and of users' layers only if the program names
    them, so that defining a layer does not recompile other programs."""
    others = {op.struct: op for op in GRADIENTS} | _OF_USERS
    declared = [op for op in OPERATIONS if op.cuda] + [
        op for name, op in sorted(others.items()) if name in name_expression
    ]
    cases = " ".join(
        f"CASE({', '.join([str(code), op.struct, *('v', 'a', 'b')[: 1 + len(op.parameters)]])})"
        for op, code in CODES.items()
    )
    return f"""#pragma once
{"".join(map(_struct, declared))}
// The activations that common/epilogue.cuh selects at run time: code, struct, arguments.
#define EACH_ACTIVATION(CASE) {cases}
"""


def _struct(op: Operation) -> str:
    arguments = ", ".join(f"Element {name}" for name in (*op.operands, *op.parameters))
    functions = {f"apply({arguments})": op.cuda}
    if issubclass(op.layer, Activation) and not op.parameters:
        functions["fast(Element x)"] = op.fast or "apply(x)"
    texts = (
        f"    template <class Element>\n    static __device__ __forceinline__ Element {head} {{ return {body}; }}\n"
        for head, body in functions.items()
    )
    return f"struct {op.struct} {{\n{''.join(texts)}}};\n"
