"""Models of one's own on single layers: `hb.Embedding` beside `nn.Embedding` with the best of its optimizers.

A matrix factorisation, a DeepFM of eight fields and a BPR, ids by a power law. nn.Embedding has dense
gradients and Adam (also fused), or sparse ones and SparseAdam; Hotbed's Adam moves the rows that a batch
has, as SparseAdam does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from benchmarks.measure import contest
from benchmarks.peers.torch_models import mlp
from benchmarks.report import Report

BATCH, DIM, ALPHA, FIELDS = 2048, 32, 1.05, 8
ROWS, THREADS = (100_000, 1_000_000), (1, 2)
BATCHES, ITERATIONS = 16, 15

Layers = Callable[[int, int], nn.Module]
"""(rows, columns) → a layer."""


class Factorisation(nn.Module):
    """Dot product of a user's and an item's vector, with a bias each."""

    ids = 2

    def __init__(self, layer: Layers, rows: int) -> None:
        super().__init__()
        self.user, self.item = layer(rows, DIM), layer(rows, DIM)
        self.user_bias, self.item_bias = layer(rows, 1), layer(rows, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        dots = (self.user(user) * self.item(item)).sum(1)
        biases = self.user_bias(user) + self.item_bias(item)
        target = (user & 1).to(dots.dtype)
        return nn.functional.binary_cross_entropy_with_logits(dots + biases.squeeze(1), target)


class Bpr(nn.Module):
    """Bayesian personalised ranking: a chosen item above a drawn one (Rendle et al., UAI 2009)."""

    ids = 3

    def __init__(self, layer: Layers, rows: int) -> None:
        super().__init__()
        self.user, self.item = layer(rows, DIM), layer(rows, DIM)

    def forward(self, user: Tensor, chosen: Tensor, drawn: Tensor) -> Tensor:
        user_vectors = self.user(user)
        above = user_vectors * (self.item(chosen) - self.item(drawn))
        return -nn.functional.logsigmoid(above.sum(1)).mean()


class DeepFM(nn.Module):
    """Eight fields, each with a layer for vectors and one for weights."""

    ids = FIELDS

    def __init__(self, layer: Layers, rows: int) -> None:
        super().__init__()
        self.vectors = nn.ModuleList(layer(rows, DIM) for _ in range(FIELDS))
        self.weights = nn.ModuleList(layer(rows, 1) for _ in range(FIELDS))
        self.deep = mlp(FIELDS * DIM, [128, 64, 1])

    def forward(self, *ids: Tensor) -> Tensor:
        every = torch.stack([layer(x) for layer, x in zip(self.vectors, ids, strict=True)], 1)
        linear = sum(layer(x) for layer, x in zip(self.weights, ids, strict=True))
        pairs = (every.sum(1).square() - every.square().sum(1)).sum(1, keepdim=True) / 2
        logits = (linear + pairs + self.deep(every.flatten(1))).squeeze(1)
        target = (ids[0] & 1).to(logits.dtype)
        return nn.functional.binary_cross_entropy_with_logits(logits, target)


MODELS: dict[str, type[Factorisation] | type[Bpr] | type[DeepFM]] = {
    "matrix factorisation": Factorisation,
    "BPR": Bpr,
    "DeepFM": DeepFM,
}


class Contender:
    """A model on layers of one kind, with the optimizers that go with them."""

    def __init__(self, name: str, model: str, rows: int, batches: list[tuple[Tensor, ...]]) -> None:
        self.name, self.model, self.rows, self.batches = name, model, rows, batches

    def nbytes(self) -> int:
        return self.rows * (DIM + 1) * 4 * 4 * (FIELDS if self.model == "DeepFM" else 2)

    def build(self) -> None:
        import hotbed as hb

        torch.manual_seed(0)
        sparse = self.name == "nn.Embedding, SparseAdam"
        layer: Layers = (
            hb.Embedding
            if self.name == "hb.Embedding"
            else lambda rows, dim: nn.Embedding(rows, dim, sparse=sparse)
        )
        self.module = MODELS[self.model](layer, self.rows)
        parameters = list(self.module.parameters())
        if self.name == "hb.Embedding":
            self.optimizers = [hb.optim.Adam(parameters, lr=1e-3)]
        elif sparse:
            dense = [p for name, p in self.module.named_parameters() if name.startswith("deep.")]
            tables = [p for p in parameters if all(p is not other for other in dense)]
            self.optimizers = [torch.optim.SparseAdam(tables, lr=1e-3)]
            self.optimizers += [torch.optim.Adam(dense, lr=1e-3)] if dense else []
        else:
            self.optimizers = [torch.optim.Adam(parameters, lr=1e-3, fused="fused" in self.name)]

    def phases(self) -> Mapping[str, Callable[[int], object]]:
        return {"step": self.step}

    def step(self, number: int) -> None:
        self.module(*self.batches[number % len(self.batches)]).backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def drop(self) -> None:
        del self.module, self.optimizers


NAMES = (
    "hb.Embedding",
    "nn.Embedding, SparseAdam",
    "nn.Embedding, Adam",
    "nn.Embedding, fused Adam",
)


def run(*, quick: bool, progress: Callable[[str], None]) -> Report:
    report = Report("layers", quick)
    threads_before = torch.get_num_threads()
    for threads in THREADS:
        torch.set_num_threads(threads)
        for rows in ROWS[:1] if quick else ROWS:
            for model, kind in MODELS.items():
                batches = _batches(kind.ids, rows)
                contenders = [Contender(name, model, rows, batches) for name in NAMES]
                timings = contest(
                    contenders,
                    12 << 30,
                    iterations=4 if quick else ITERATIONS,
                    progress=lambda text, m=model: progress(f"{m}: {text}"),
                )
                config = (
                    f"{model}, {rows:,} rows, batch {BATCH}, {threads} thread{'s'[: threads - 1]}"
                )
                medians = {}
                for name in NAMES:
                    report.add(name, config, timings[name, "step"])
                    medians[name] = timings[name, "step"].median
                best = min(NAMES[1:], key=medians.__getitem__)
                report.ratios[f"{config}: {best}/hb.Embedding"] = medians[best] / medians[NAMES[0]]
    torch.set_num_threads(threads_before)
    return report


def _batches(columns: int, rows: int) -> list[tuple[Tensor, ...]]:
    """Ids by a power law (`hotbed.data.synthetic_clicks`), scattered over the rows of each column."""
    draw = torch.Generator().manual_seed(0)
    gamma = 1 - ALPHA
    orders = [torch.randperm(rows, generator=draw) for _ in range(columns)]
    batches = []
    for _ in range(BATCHES):
        batch = []
        for order in orders:
            uniform = torch.rand(BATCH, generator=draw, dtype=torch.float64)
            rank = (uniform * ((rows + 1) ** gamma - 1) + 1) ** (1 / gamma) - 1
            batch.append(order[rank.long().clamp(0, rows - 1)])
        batches.append(tuple(batch))
    return batches
