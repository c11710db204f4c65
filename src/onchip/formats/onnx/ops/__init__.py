"""ONNX operators, reading and writing: one file per family, mirroring network/layers.

Every module of this folder is imported here, so a new file is enough to add an operator.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
