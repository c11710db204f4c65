"""Real MPI ranks on this machine, for tests."""

import importlib.util
import os
from pathlib import Path

import pytest

from conftest import SRC
from onchip.runtime.distributed.supervise import OPEN_MPI, find_mpiexec

needs_mpi = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or find_mpiexec() is None, reason="no MPI: pip install 'onchip[mpi]'"
)
ENV = {**OPEN_MPI, **os.environ, "PYTHONPATH": os.pathsep.join([str(SRC), str(Path(__file__).parent)])}
