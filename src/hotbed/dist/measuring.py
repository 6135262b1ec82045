"""`measure`: the seconds that units of a step's work take on this machine, or between these ranks.

It times forwards, backwards and steps of small models whose work is known (`PROBES`), and finds the figures
with which predicted times come closest to them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as torch_dist
from numpy.typing import NDArray
from torch import Tensor

from hotbed.collection import EmbeddingCollection
from hotbed.dist.costs import Costs
from hotbed.dist.distribute import distribute
from hotbed.dist.plans import Plan
from hotbed.dist.rates import ALIKE, PHASE_OF, PHASES, UNITS, Rates
from hotbed.dist.sizes import Sizes, states_of
from hotbed.dist.traffic import traffic_of
from hotbed.errors import PlanError
from hotbed.optim import Adagrad
from hotbed.paths import path_text
from hotbed.sharding import Replicated, RowWise, Sharding, TableWise
from hotbed.tables import Table

__all__ = ["PROBES", "Probe", "fitted", "measure"]

_BATCHES = 10
"""Of a probe, so that a step does not find its rows in a cache."""
_ROUNDS, _WARM_UP, _ITERATIONS = 4, 1, 4
"""Rounds through all probes, steps of each before it is timed, and timed ones."""
_QUANTILE = 0.25
"""Of the times of a probe, as other work on the machine makes some longer."""
_SWEEPS, _WEIGHINGS, _SMALL_ERROR = 1000, 6, 0.02
_PROCESSES = 2
_SSD_SECONDS = 100e-6
"""Of a row from an SSD, where none was measured."""
_READS, _READ_BYTES = 256, 4096


class Probe(NamedTuple):
    """A small model, all of whose tables are alike."""

    kind: str
    """"row", "table" (spread evenly over the ranks) or "replicated"."""
    tables: int
    rows: int
    dim: int
    bags: int
    ids: int = 1
    """Of a bag."""
    power: float = 1.0
    """Ids are ``rows * u ** power``, u being uniform: 1 is uniform, more is skewed."""

    def sharding(self, at: int, ranks: int) -> Sharding:
        """Return how table number `at` is cut."""
        kinds: dict[str, Sharding] = {
            "row": RowWise(),
            "table": TableWise(at * ranks // self.tables),
            "replicated": Replicated(),
        }
        return kinds[self.kind]

    def batch(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Return (bags, ids) int64 ids of each table."""
        shape = self.tables, self.bags, self.ids
        drawn = torch.rand(shape, generator=generator, dtype=torch.float64) ** self.power
        ids = (drawn * self.rows).long()
        return {f"t{at}": ids[at] for at in range(self.tables)}


PROBES = (
    Probe("row", 2, 1000, 16, 16),
    Probe("row", 64, 1000, 16, 16),
    Probe("table", 64, 1000, 16, 8, 8),
    # A row's cost by its bytes; rows that are split and rows that are not.
    Probe("row", 4, 20_000, 16, 8192),
    Probe("row", 4, 20_000, 128, 2048),
    Probe("table", 4, 20_000, 16, 8192),
    Probe("table", 4, 20_000, 128, 2048),
    # From memory.
    Probe("table", 2, 200_000, 64, 4096),
    Probe("row", 2, 400_000, 32, 4096),
    Probe("row", 1, 300_000, 128, 4096),
    # Ids that occur again and again.
    Probe("row", 8, 20_000, 32, 8192, power=6.0),
    Probe("table", 8, 2000, 32, 8192),
    Probe("table", 4, 2000, 128, 2048),
    Probe("replicated", 4, 20_000, 64, 4096),
    Probe("replicated", 4, 4000, 16, 8192),
    Probe("row", 8, 20_000, 32, 2048, 3),
    # Bags that owners pool.
    Probe("table", 4, 20_000, 16, 1024, 20),
    Probe("table", 4, 20_000, 128, 256, 20),
    Probe("table", 2, 200_000, 64, 256, 20),
    Probe("row", 4, 20_000, 32, 512, 20),
    Probe("table", 8, 2000, 32, 1024, 20),
    Probe("table", 8, 20_000, 64, 512, 20, power=6.0),
    Probe("replicated", 4, 20_000, 32, 512, 20),
)
"""Models that are timed."""


def measure(
    *,
    shared_memory: bool = True,
    ssd: str | os.PathLike[str] | None = None,
    local_world_size: int | None = None,
) -> Rates:
    """Measure a machine for `Measured`, in some seconds.

    With a process group, all ranks call this, and it measures them as they are, with the link between them;
    else it starts two processes on this machine, which share its cores.

    Args:
        shared_memory: as `hotbed.distribute` is told.
        ssd: a folder on the SSD on which rows will lie; None: 0.1 ms a row is assumed.
        local_world_size: of a process group: ranks on each machine. Bytes of the same machine are then
            measured apart from those of others.

    Returns:
        The same figures on all ranks.

    Raises:
        PlanError: a started process failed; or `local_world_size` does not divide the ranks.
        PeerError: another rank does not call this.
    """
    if not torch_dist.is_available() or not torch_dist.is_initialized():
        found = _in_processes(shared_memory)
    else:
        found = _between_ranks(shared_memory, local_world_size)
    if ssd is None:
        return found
    seconds = found.seconds
    seconds[UNITS.index("ssd_row")] = _read_seconds(path_text(ssd, "ssd"))
    return _of_first_rank(seconds)


def fitted(amounts: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (U,) seconds of units, none below 0, whose sums come closest to what was timed.

    The sum of relative errors is least (by least squares, weighted anew by what is left of each error), so
    that a time which something has disturbed counts little.

    Args:
        amounts: (n, U) of each unit; times: (n,) seconds.
    """
    scaled = amounts / times[:, None]
    largest = scaled.max(0, initial=0.0)
    columns = scaled / np.where(largest > 0, largest, 1.0)
    weights, found = np.ones(len(times)), np.zeros(amounts.shape[1])
    for _ in range(_WEIGHINGS):
        found = _least_squares(columns * weights[:, None], weights, found)
        weights = 1 / np.sqrt(np.maximum(np.abs(columns @ found - 1), _SMALL_ERROR))
    return np.divide(found, np.where(largest > 0, largest, 1.0))


def _least_squares(
    columns: NDArray[np.float64], target: NDArray[np.float64], start: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return (U,) factors from 0 on with which (n, U) columns add up to (n,) targets, by coordinate descent
    on the normal equations."""
    gram, products = columns.T @ columns, columns.T @ target
    diagonal = np.where(np.diag(gram) > 0, np.diag(gram), 1.0)
    found: NDArray[np.float64] = start.copy()
    for _ in range(_SWEEPS):
        for at in range(len(found)):
            step = (products[at] - gram[at] @ found) / diagonal[at]
            found[at] = max(0.0, found[at] + step)
    return found


def _between_ranks(shared_memory: bool, local_world_size: int | None = None) -> Rates:
    """Called by all ranks."""
    running = [_Running(probe, shared_memory, local_world_size) for probe in PROBES]
    for one in running:
        one.run(_BATCHES, 0)  # rows that are touched for the first time take longer
    for _ in range(_ROUNDS):  # so that what disturbs the machine for a while disturbs all of them
        for one in running:
            one.run(_WARM_UP, _ITERATIONS)
    amounts = np.array([one.amounts for one in running])
    times = np.array([one.seconds() for one in running])
    backward = np.array([name.startswith("backward_") for name in UNITS])
    step = PHASE_OF >= PHASES.index("send gradients")
    seconds = np.zeros(len(UNITS))
    for at, units in enumerate((~backward & ~step, backward, step)):
        seconds[units] = fitted(amounts[:, units], times[:, at])
    seconds[UNITS.index("ssd_row")] = _SSD_SECONDS
    for name, alike in ALIKE.items():
        if not amounts[:, UNITS.index(name)].any():
            seconds[UNITS.index(name)] = seconds[UNITS.index(alike)]
    return _of_first_rank(seconds)


def _of_first_rank(seconds: NDArray[np.float64]) -> Rates:
    if torch_dist.is_available() and torch_dist.is_initialized():
        told = torch.from_numpy(seconds.copy())
        torch_dist.broadcast(told, 0)
        seconds = told.numpy()
    return Rates.of(seconds.tolist())


class _Running:
    """A probe on its ranks.

    Attributes:
        amounts: (U,) of its work in a step.
    """

    def __init__(self, probe: Probe, shared_memory: bool, local_world_size: int | None) -> None:
        """Called by all ranks."""
        rank, ranks = torch_dist.get_rank(), torch_dist.get_world_size()
        tables = [Table(f"t{at}", probe.dim, probe.rows) for at in range(probe.tables)]
        kinds = {table.name: probe.sharding(at, ranks) for at, table in enumerate(tables)}
        self._model = EmbeddingCollection(tables, seed=0)
        distribute(
            self._model,
            Plan(tables, ranks, kinds),
            shared_memory=shared_memory,
            local_world_size=local_world_size,
        )
        self._optimizer = Adagrad(self._model.parameters(), lr=0.01)
        drawn = torch.Generator().manual_seed(rank)
        self._batches = [probe.batch(drawn) for _ in range(_BATCHES)]
        self._gradients = [torch.ones(probe.bags, probe.dim) for _ in tables]
        self._times: list[list[float]] = []
        self._steps = 0
        nothing, traffic = Rates.of([0.0] * len(UNITS)), traffic_of(tables, self._batches)
        sizes, local = Sizes(states_of(Adagrad)), local_world_size
        costs = Costs(ranks, nothing, traffic, sizes, local_world_size=local)
        units = costs.work_of_calls().units
        for table in tables:
            units = units + costs.work_of(table, kinds[table.name]).units
        self.amounts: NDArray[np.float64] = units[:, 0].max(1)

    def run(self, warm_up: int, timed: int) -> None:
        """Take some steps. Called by all ranks."""
        for number in range(warm_up + timed):
            batch = self._batches[self._steps % _BATCHES]
            self._steps += 1
            torch_dist.barrier()
            marks = [time.perf_counter()]
            vectors = [*self._model(batch).values()]
            marks.append(time.perf_counter())
            torch.autograd.backward(vectors, self._gradients)
            marks.append(time.perf_counter())
            self._optimizer.step()
            marks.append(time.perf_counter())
            self._optimizer.zero_grad()
            if number >= warm_up:
                phases = zip(marks, marks[1:], strict=False)
                self._times.append([after - before for before, after in phases])

    def seconds(self) -> list[float]:
        """Return the seconds of forward, backward and step of the slowest rank. Called by all ranks."""
        slowest = torch.tensor(self._times, dtype=torch.float64)
        torch_dist.all_reduce(slowest, torch_dist.ReduceOp.MAX)
        found: list[float] = slowest.quantile(_QUANTILE, 0).tolist()
        return found


# -- processes of this machine -------------------------------------------------------------------------------


def _in_processes(shared_memory: bool) -> Rates:
    """Measure between processes of this machine that are started for it."""
    threads = max(1, (os.cpu_count() or 1) // _PROCESSES)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    code = "import sys; from hotbed.dist.measuring import work; work(*sys.argv[1:])"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code, folder, str(int(shared_memory))]
        processes = [
            subprocess.Popen(
                [*command, str(rank)],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(_PROCESSES)
        ]
        try:
            errors = [process.communicate()[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for process, error in zip(processes, errors, strict=True):
            if process.returncode:
                last = (error.strip().splitlines() or ["no message"])[-1]
                raise PlanError(f"A process that measures this machine failed: {last}")
        return Rates.read(Path(folder) / "rates.toml")


def work(folder: str, shared_memory: str, rank: str) -> None:
    """Measure as one of the processes of this machine, and write the figures to the folder."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch_dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=_PROCESSES
    )
    found = _between_ranks(shared_memory == "1")
    if rank == "0":
        found.write(Path(folder) / "rates.toml")
    torch_dist.barrier()
    torch_dist.destroy_process_group()


def _read_seconds(folder: str) -> float:
    """Return the seconds of one random read of a page from a file in a folder, past the page cache."""
    size = _READS * 16 * _READ_BYTES
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(os.urandom(size))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        places = np.random.default_rng(0).permutation(size // _READ_BYTES)[:_READS]
        begin = time.perf_counter()
        for at in places.tolist():
            os.pread(file.fileno(), _READ_BYTES, at * _READ_BYTES)
        return (time.perf_counter() - begin) / _READS
