"""A plain MPI program of numpy arrays: heat on a ring, without a torch process group.

    mpiexec -n 2 python scripts/examples/mpi_numpy.py ROOT STEPS
"""

from __future__ import annotations

import sys

import numpy
from mpi4py import MPI

import distckpt

SIZE = 1000


def start(rank: int) -> numpy.ndarray:
    """This rank's part of the ring."""
    return numpy.sin(numpy.arange(rank * SIZE, (rank + 1) * SIZE) * 0.01)


def advance(field: numpy.ndarray, left: float, right: float) -> numpy.ndarray:
    """One step, with the neighbours' edges."""
    wide = numpy.concatenate([[left], field, [right]])
    return field + 0.1 * (wide[:-2] - 2.0 * field + wide[2:])


def main(folder: str, steps: int) -> None:
    comm = MPI.COMM_WORLD
    rank, world = comm.Get_rank(), comm.Get_size()
    with distckpt.CheckpointManager(folder, save_every=10, keep_last=2) as manager:
        found, step, field = manager.resume().checkpoint, 0, start(rank)
        if found is not None:
            step, field = found.step, numpy.load(found.mine("field.npy"))
        begun = step
        while step < steps:
            left = comm.sendrecv(float(field[-1]), dest=(rank + 1) % world, source=(rank - 1) % world)
            right = comm.sendrecv(float(field[0]), dest=(rank - 1) % world, source=(rank + 1) % world)
            field = advance(field, left, right)
            step += 1
            todo = manager.poll(step)
            if todo.save or step == steps:
                with manager.saving(step, on_exists="skip") as files:
                    numpy.save(files.mine("field.npy"), field)
            if todo.stop:
                break
    whole = comm.gather(field)
    if whole is not None:
        print(f"from {begun} to {step}: field {numpy.concatenate(whole).tobytes().hex()[-64:]}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
