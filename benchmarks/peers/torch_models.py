"""Click models of stock torch parts, as their papers have them: twins of those in `hotbed.models`.

Dense layers are made in the order of their twins', so that weights can be copied one after the other.
Shapes: B samples, F = 26 vectors of d columns, D = 13 + F d columns side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks.peers.torch_dlrm import COLUMNS, DENSE

HIDDEN = (256, 128)


def mlp(columns: int, widths: Sequence[int], *, last_relu: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Linear(columns, width), nn.ReLU()]
        columns = width
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


class TorchClickModel(nn.Module):
    """26 sparse `nn.Embedding`, and as many of width 1 where ids have weights of their own."""

    has_linear = False

    def __init__(self, rows: Sequence[int], dim: int = 16) -> None:
        super().__init__()
        self.dim, self.width = dim, DENSE + dim * len(rows)
        self.tables = nn.ModuleList(nn.Embedding(n, dim, sparse=True) for n in rows)
        self.weights = nn.ModuleList(
            nn.Embedding(n, 1, sparse=True) for n in (rows if self.has_linear else ())
        )
        self.wide = nn.Linear(DENSE, 1) if self.has_linear else None

    def vectors(self, batch: dict[str, Tensor]) -> list[Tensor]:
        return [table(batch[c]) for table, c in zip(self.tables, COLUMNS, strict=True)]

    def flat(self, batch: dict[str, Tensor], vectors: list[Tensor]) -> Tensor:
        return torch.cat([batch["dense"], *vectors], 1)

    def linear(self, batch: dict[str, Tensor]) -> Tensor:
        assert self.wide is not None
        each = [weight(batch[c]) for weight, c in zip(self.weights, COLUMNS, strict=True)]
        return self.wide(batch["dense"]) + torch.cat(each, 1).sum(1, keepdim=True)


class TorchWideDeep(TorchClickModel):
    has_linear = True

    def __init__(self, rows: Sequence[int], dim: int = 16) -> None:
        super().__init__(rows, dim)
        self.deep = mlp(self.width, [*HIDDEN, 1])

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        vectors = self.vectors(batch)
        return (self.linear(batch) + self.deep(self.flat(batch, vectors))).squeeze(1)


class TorchDeepFM(TorchWideDeep):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        vectors = self.vectors(batch)
        every = torch.stack(vectors, 1)
        pairs = (every.sum(1).square() - every.square().sum(1)).sum(1, keepdim=True) / 2
        return (self.linear(batch) + pairs + self.deep(self.flat(batch, vectors))).squeeze(1)


class TorchXDeepFM(TorchClickModel):
    has_linear = True

    def __init__(self, rows: Sequence[int], dim: int = 16) -> None:
        super().__init__(rows, dim)
        count = len(rows)
        self.maps = nn.ModuleList(
            nn.Conv1d(before * count, 16, 1, bias=False) for before in (count, 16, 16)
        )
        self.of_maps = nn.Linear(48, 1)
        self.deep = mlp(self.width, [*HIDDEN, 1])

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        vectors = self.vectors(batch)
        first = every = torch.stack(vectors, 1)  # (B, F, d)
        sums = []
        for convolution in self.maps:
            products = torch.einsum("bhd,bfd->bhfd", every, first).flatten(1, 2)
            every = convolution(products)
            sums.append(every.sum(2))
        products = self.of_maps(torch.cat(sums, 1))
        return (self.linear(batch) + products + self.deep(self.flat(batch, vectors))).squeeze(1)


class TorchPNN(TorchClickModel):
    def __init__(self, rows: Sequence[int], dim: int = 16) -> None:
        super().__init__(rows, dim)
        count = len(rows)
        below = torch.tril_indices(count, count, -1)
        self.register_buffer("below", below, persistent=False)
        self.deep = mlp(self.width + below.shape[1], [*HIDDEN, 1])

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        vectors = self.vectors(batch)
        every = torch.stack(vectors, 1)
        dots = (every @ every.transpose(1, 2))[:, self.below[0], self.below[1]]
        return self.deep(torch.cat([self.flat(batch, vectors), dots], 1)).squeeze(1)


class TorchDCN(TorchClickModel):
    """DCN V2 in parallel."""

    def __init__(self, rows: Sequence[int], dim: int = 16, layers: int = 3) -> None:
        super().__init__(rows, dim)
        self.weight = nn.Parameter(torch.empty(layers, *self._shape()))
        self.bias = nn.Parameter(torch.empty(layers, self.width))
        self.deep = mlp(self.width, HIDDEN, last_relu=True)
        self.top = nn.Linear(self.width + HIDDEN[-1], 1)

    def _shape(self) -> tuple[int, ...]:
        return self.width, self.width

    def crossed(self, x: Tensor) -> Tensor:
        each = x
        for weight, bias in zip(self.weight, self.bias, strict=True):
            each = x * nn.functional.linear(each, weight, bias) + each
        return each

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.flat(batch, self.vectors(batch))
        return self.top(torch.cat([self.crossed(x), self.deep(x)], 1)).squeeze(1)


class TorchDCNv1(TorchDCN):
    def _shape(self) -> tuple[int, ...]:
        return (self.width,)

    def crossed(self, x: Tensor) -> Tensor:
        each = x
        for weight, bias in zip(self.weight, self.bias, strict=True):
            each = x * (each @ weight).unsqueeze(1) + bias + each
        return each


class TorchAutoInt(TorchClickModel):
    def __init__(self, rows: Sequence[int], dim: int = 16) -> None:
        super().__init__(rows, dim)
        self.of_dense = nn.Parameter(torch.empty(DENSE, dim))
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(before, 32, bias=False) for _ in range(4))
            for before in (dim, 32, 32)
        )
        self.top = nn.Linear((DENSE + len(rows)) * 32, 1)
        self.deep = mlp(self.width, [*HIDDEN, 1])

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        vectors = self.vectors(batch)
        every = torch.cat([batch["dense"].unsqueeze(2) * self.of_dense, torch.stack(vectors, 1)], 1)
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleList)
            heads = [
                each(every).view(*every.shape[:2], 2, 16).transpose(1, 2) for each in layer[:3]
            ]
            attended = nn.functional.scaled_dot_product_attention(*heads, scale=1.0)
            every = torch.relu(attended.transpose(1, 2).flatten(2) + layer[3](every))
        return (self.top(every.flatten(1)) + self.deep(self.flat(batch, vectors))).squeeze(1)


class TorchFinalMLP(TorchClickModel):
    def __init__(self, rows: Sequence[int], dim: int = 16) -> None:
        super().__init__(rows, dim)
        self.contexts = nn.ParameterList()
        self.gates = nn.ModuleList()
        for _ in range(2):
            self.contexts.append(nn.Parameter(torch.empty(1, 64)))
            self.gates.append(mlp(64, [64, self.width]))
        self.streams = nn.ModuleList(mlp(self.width, HIDDEN, last_relu=True) for _ in range(2))
        self.bilinear = nn.Parameter(torch.empty(2, 64, 64))
        self.linear_part = nn.Linear(256, 1)

    def dense_parameters(self) -> list[nn.Parameter]:
        gates = [
            parameter
            for context, gate in zip(self.contexts, self.gates, strict=True)
            for parameter in (context, *gate.parameters())
        ]
        fusion = [self.bilinear, *self.linear_part.parameters()]
        return [*gates, *self.streams.parameters(), *fusion]

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.flat(batch, self.vectors(batch))
        one, other = (
            stream(x * 2 * torch.sigmoid(gate(context)))
            for stream, gate, context in zip(self.streams, self.gates, self.contexts, strict=True)
        )
        products = torch.einsum(
            "bhi,hij,bhj->b", one.view(-1, 2, 64), self.bilinear, other.view(-1, 2, 64)
        )
        return self.linear_part(torch.cat([one, other], 1)).squeeze(1) + products


class TorchMMoE(TorchClickModel):
    """One task, as the log has one label."""

    def __init__(self, rows: Sequence[int], dim: int = 16) -> None:
        super().__init__(rows, dim)
        self.experts = nn.ModuleList(mlp(self.width, HIDDEN) for _ in range(3))
        self.gate = nn.Linear(self.width, 3, bias=False)
        self.tower = nn.Linear(HIDDEN[-1], 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.flat(batch, self.vectors(batch))
        shares = self.gate(x).softmax(1).unsqueeze(2)
        mixed = (torch.stack([expert(x) for expert in self.experts], 1) * shares).sum(1)
        return self.tower(mixed).squeeze(1)
