"""Hotbed's training step in its three phases: on one process, and shared by ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as torch_dist

from benchmarks.peers.hotbed_tables import HotbedTables
from benchmarks.workload import Workload


class HotbedAlone(HotbedTables):
    """Each process trains tables of its own on its samples: the step without an exchange."""

    def __init__(self, workload: Workload, optimizer: str, lr: float) -> None:
        super().__init__(workload, optimizer, lr)
        self.name = "hotbed, one process"

    def nbytes(self) -> int:
        return super().nbytes() * torch_dist.get_world_size()

    def phases(self) -> Mapping[str, Callable[[int], object]]:
        return {"forward": self.look_up, "backward": self.send_back, "step": self.update}

    def look_up(self, i: int) -> None:
        self.vectors = self.embeddings(self.batches[i % len(self.batches)])

    def send_back(self, i: int) -> None:
        torch.autograd.backward(list(self.vectors.values()), self.gradients)

    def update(self, i: int) -> None:
        self.stepper.step()
        self.stepper.zero_grad()

    def drop(self) -> None:
        super().drop()
        self.vectors = None


class HotbedRanks(HotbedAlone):
    """Tables that the ranks share. `how`: ``"table"``, ``"row"`` or ``"column"``, all of them. `over`:
    ``"memory"`` or ``"gloo"``."""

    def __init__(
        self, workload: Workload, optimizer: str, lr: float, how: str, over: str = "memory"
    ) -> None:
        super().__init__(workload, optimizer, lr)
        self.how, self._over = how, over
        self.name = f"hotbed{' over gloo' if over == 'gloo' else ''}, {how}-wise"

    def nbytes(self) -> int:
        return HotbedTables.nbytes(self)

    def shared(self, embeddings: Any) -> Any:
        import hotbed as hb

        world, tables = torch_dist.get_world_size(), list(embeddings.tables.values())
        self.owners = [t * world // len(tables) for t in range(len(tables))]
        kinds: dict[str, Callable[[int], hb.dist.Sharding]] = {
            "table": hb.dist.TableWise,
            "row": lambda owner: hb.dist.RowWise(),
            "column": lambda owner: hb.dist.ColumnWise(tuple(range(world))),
        }
        made = zip(tables, self.owners, strict=True)
        cut = {table.name: kinds[self.how](owner) for table, owner in made}
        self.plan = hb.dist.Plan(tables, world, cut)
        return self.distributed(embeddings, self.plan)

    def distributed(self, embeddings: Any, plan: Any) -> Any:
        import hotbed as hb

        return hb.distribute(embeddings, plan, shared_memory=self._over == "memory")

    def ids_to_assign(self) -> torch.Tensor:
        return torch.arange(torch_dist.get_rank(), self.workload.rows, torch_dist.get_world_size())

    @property
    def ranks(self) -> Any:
        return self.embeddings.table("t0").place.ranks

    def one_step(self, i: int) -> None:
        for phase in self.phases().values():
            phase(i)

    def bytes_sent(self) -> dict[str, float]:
        """By this rank in a step, by what they are; the mean over the batches."""
        before = dict(self.ranks.sent)
        for i in range(len(self.batches)):
            self.one_step(i)
        return {
            what: (self.ranks.sent[what] - before.get(what, 0)) / len(self.batches)
            for what in ("ids", "rows", "vectors", "gradients")
            if what in self.ranks.sent
        }

    def least_bytes(self) -> float:
        """What must go from and to this rank in a step: of each distinct id that another rank keeps
        its 8 bytes, its row and its gradient, once."""
        rank, away = torch_dist.get_rank(), 0
        for of_tables in self.workload.ids:
            for t, ids in enumerate(of_tables):
                distinct = torch.from_numpy(ids).unique()
                away += int((self.plan.owner_of(f"t{t}", distinct) != rank).sum())
        return away / len(self.workload.ids) * (8 + 2 * 4 * self.workload.dim)

    def messages(self, steps: int) -> dict[str, float]:
        """Milliseconds of a step that go by in each kind of message, waiting included, and until the
        first of them; medians. ``"handshakes"``: how many there are."""
        clock = _Messages(self.ranks)
        for i in range(steps):
            torch_dist.barrier()
            clock.begin()
            self.one_step(i)
        return clock.end()


class _Messages:
    """Looks on while ranks tell each other something."""

    def __init__(self, ranks: Any) -> None:
        self._ranks, self._steps = ranks, []
        self._handshake, self._send = ranks.handshake, ranks.send
        ranks.handshake = self._timed(
            self._handshake, lambda kind, *rest, **named: f"handshake: {kind}"
        )
        ranks.send = self._timed(self._send, lambda what, *rest, **named: what)

    def begin(self) -> None:
        self._steps.append({"handshakes": 0})
        self._began = time.perf_counter()

    def end(self) -> dict[str, float]:
        del self._ranks.handshake, self._ranks.send
        return {
            name: statistics.median(step[name] for step in self._steps) for name in self._steps[0]
        }

    def _timed(self, call: Callable[..., Any], name_of: Callable[..., str]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin, step, name = time.perf_counter(), self._steps[-1], name_of(*args, **kwargs)
            step.setdefault("until the first message", (begin - self._began) * 1e3)
            step["handshakes"] += name.startswith("handshake")
            result = call(*args, **kwargs)
            step[name] = step.get(name, 0.0) + (time.perf_counter() - begin) * 1e3
            return result

        return timed
