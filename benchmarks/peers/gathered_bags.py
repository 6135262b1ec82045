"""Every rank has all of `nn.EmbeddingBag(sparse=True)`; sparse gradients are gathered and averaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.torch_bags import TorchBags
from benchmarks.workload import Workload


class GatheredBags(TorchBags):
    """With one message for the ids of all tables and one for their rows."""

    def __init__(self, workload: Workload, optimizer: str, lr: float) -> None:
        super().__init__(workload, optimizer, lr)
        self.name = "torch, gathered"

    def nbytes(self) -> int:
        return super().nbytes() * torch_dist.get_world_size()

    def phases(self) -> Mapping[str, Callable[[int], object]]:
        return {"forward": self.look_up, "backward": self.send_back, "step": self.update}

    def look_up(self, i: int) -> None:
        ids = self.batches[i % len(self.batches)]
        self.outputs = [bag(*x) for bag, x in zip(self.bags, ids, strict=True)]

    def send_back(self, i: int) -> None:
        torch.autograd.backward(self.outputs, self.gradients)
        gather_gradients([bag.weight for bag in self.bags])

    def update(self, i: int) -> None:
        self.stepper.step()
        self.stepper.zero_grad()

    def drop(self) -> None:
        super().drop()
        self.outputs = []


class DdpBags(GatheredBags):
    """By DistributedDataParallel, which does it table by table."""

    def __init__(self, workload: Workload, optimizer: str, lr: float) -> None:
        super().__init__(workload, optimizer, lr)
        self.name = "torch, DDP"

    def build(self) -> None:
        super().build()
        self.model = DistributedDataParallel(_Bags(self.bags))

    def look_up(self, i: int) -> None:
        self.outputs = self.model(self.batches[i % len(self.batches)])

    def send_back(self, i: int) -> None:
        torch.autograd.backward(self.outputs, self.gradients)

    def drop(self) -> None:
        super().drop()
        self.model = None


class _Bags(nn.Module):
    def __init__(self, bags: Sequence[nn.Module]) -> None:
        super().__init__()
        self.bags = nn.ModuleList(bags)

    def forward(self, inputs: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
        return [bag(*x) for bag, x in zip(self.bags, inputs, strict=True)]


def gather_gradients(weights: Sequence[Tensor]) -> None:
    """Makes the sparse gradients of tables of one width their means over the ranks."""
    world = torch_dist.get_world_size()
    own = [weight.grad.coalesce() for weight in weights]
    counts = torch.tensor([len(grad.values()) for grad in own])
    told = [torch.empty_like(counts) for _ in range(world)]
    torch_dist.all_gather(told, counts)
    most = max(int(counts.sum()) for counts in told)
    ids = _gathered(torch.cat([grad.indices()[0] for grad in own]), most)
    rows = _gathered(torch.cat([grad.values() for grad in own]).div_(world), most)
    of_rank = [
        (i[: int(n.sum())].split(n.tolist()), r[: int(n.sum())].split(n.tolist()))
        for i, r, n in zip(ids, rows, told, strict=True)
    ]
    for t, weight in enumerate(weights):
        indices = torch.cat([ids[t] for ids, _ in of_rank]).unsqueeze(0)
        values = torch.cat([rows[t] for _, rows in of_rank])
        weight.grad = torch.sparse_coo_tensor(indices, values, weight.shape)


def _gathered(own: Tensor, most: int) -> list[Tensor]:
    """Of each rank (most, ...), as all must be of one size."""
    padded = own.new_empty((most, *own.shape[1:]))
    padded[: len(own)] = own
    found = [torch.empty_like(padded) for _ in range(torch_dist.get_world_size())]
    torch_dist.all_gather(found, padded)
    return found
