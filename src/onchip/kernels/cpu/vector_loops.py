"""The compiler of the CPU's kernels: Numba's own, whose loops become vector code of full width.

For chips that clock down while they work on 512-bit vectors LLVM takes 256 bits by itself. The register tile (tile.py)
clocks them down anyway, so the loops around it should be as wide: tanh and the like take two thirds of the time.
"""

from __future__ import annotations

from typing import Any

from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.lowering import Lower
from numba.core.typed_passes import NativeLowering

from onchip.kernels.vectors import VECTOR_BYTES

_FULL_WIDTH = f'"prefer-vector-width"="{VECTOR_BYTES * 8}"'


class _Lower(Lower):  # type: ignore[misc]
    def setup_function(self, fndesc: Any) -> None:
        super().setup_function(fndesc)
        set.add(self.function.attributes, _FULL_WIDTH)  # llvmlite's own `add` knows no attribute with a value


@register_pass(mutates_CFG=True, analysis_only=False)
class _Lowering(NativeLowering):  # type: ignore[misc]
    _name = "onchip_lowering"

    @property
    def lowering_class(self) -> type[Lower]:
        return _Lower


class KernelCompiler(CompilerBase):  # type: ignore[misc]
    def define_pipelines(self) -> list[Any]:
        manager = DefaultPassBuilder.define_nopython_pipeline(self.state)
        manager.passes = [(_Lowering if each is NativeLowering else each, told) for each, told in manager.passes]
        manager.finalize()
        return [manager]
