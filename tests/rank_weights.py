"""Weights made by several ranks together, two a machine: mpiexec -n 4 python rank_weights.py. A line a rank."""

import hashlib
import sys

from onchip.errors import KernelError
from onchip.plan.kernel import Job
from onchip.runtime.cpu import weights as cpu_weights
from onchip.runtime.distributed import ranks
from onchip.runtime.placement import plan
from text_networks import text_network


def text_plan():
    net = text_network(V=3000, branches=((2, 16), (3, 20)))
    return plan(net, "cpu", Job("fp32", 1 << 20, tables="bf16"))


def digest(made):
    """Of what the groups read, whatever it is called."""
    arrays = sorted(array.tobytes() for recipe, array in made.items() if not isinstance(recipe, str))
    return hashlib.sha256(b"".join(arrays)).hexdigest()


if __name__ == "__main__":
    ranks.same_machine = lambda comm, mpi: comm.Split(comm.rank // 2)
    cpu_weights.LARGE_US, cpu_weights.pays_to_exchange = 0.0, lambda *cost: True
    found = ranks.find_ranks()
    made = cpu_weights.make_weights(text_plan(), 1, found)
    error = None
    try:
        found.meet(KernelError("out of luck") if found.rank == 2 else None)
    except KernelError as raised:
        error = raised.what
    sys.stdout.write(f"{found.rank} {found.machine} {found.machines} {digest(made)} {error.partition(' on ')[0]}\n")
    found.leave()
