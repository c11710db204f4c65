"""ONNX operators, both ways: one file a family, the counterpart of network/layers.

Every module of this folder is imported here, so an operator is added by adding a file.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
