"""The C++ names of dtypes."""

from __future__ import annotations

ELEMENT_TYPES = {"float32": "float", "float16": "f16", "bfloat16": "bf16"}  # as common/dtype.cuh names them
IDS = {"int32": "int", "int64": "long long"}
FLOATS = ELEMENT_TYPES | {"float64": "double"}  # plus float64, for general kernels (common/accumulator.cuh)
