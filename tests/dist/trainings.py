"""Trainings that ranks and one process do alike: which there are, and their batches.

All numbers are such that every sum is exact, in any order: gradients of outputs are quarters, bags that
are pooled by mean have weights of a sum of 2^k, by sqrtn of a sum of squares of 4^k.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from dist.pairwise import Choice

import hotbed as hb
from hotbed.dist import ColumnWise, GridWise, Replicated, RowWise, Sharding, TableWise

BATCH = 12
DIMS = (4, 5, 8, 17)
ROWS = 53
POOL = 48
"""Distinct ids of a dynamic table."""

OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.5, "nesterov": True, "weight_decay": 0.01},
    "Adagrad": {"lr_decay": 0.1},
    "RowwiseAdagrad": {"initial_accumulator_value": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "RowwiseAdam": {},
    "Adamax": {},
    "Adadelta": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "FTRL": {"l1": 0.01, "beta": 0.1},
}
RULES = [rule.__name__ for rule in hb.optim.RULES]

FACTORS: dict[str, Sequence[Any]] = {
    "rule": [f"{rule} {untouched}" for rule in RULES for untouched in ("lazy", "exact")],
    "input": ["one-hot", "fixed", "ragged", "weighted", "sparse", "shared", "empty rank", "empty bags"],
    "shard": ["first", "last", "row", "modulo", "column", "grid", "replicated"],
    "combiner": ["sum", "mean", "sqrtn", "max", "none"],
    "world": [1, 2, 3, 4],
    "hosts": [0, 1],
    "local": [1, 2],
    "depth": [0, 2],
    "place": ["memory", "budget", "ssd", "three tiers"],
    "dtype": ["float32", "float16", "bfloat16"],
    "ids": ["static", "dynamic"],
    "padding": [False, True],
}  # fmt: skip

WEIGHTS_NEED = "weights need a table whose combiner is sum, mean or sqrtn"
BY_COLUMNS = "a row's mean of g^2 over its columns is not that of the columns that a rank keeps"
EMPTY_FOR_ALL = "see test_a_step_counts_where_no_rank_has_ids"
MOST_PROCESSES = "there are four processes at most"
REFUSED: list[tuple[str, Any, str, Any, str]] = [
    ("world", 4, "hosts", 1, MOST_PROCESSES),
    ("input", "empty rank", "world", 1, EMPTY_FOR_ALL),
    *[
        ("input", kind, "combiner", combiner, WEIGHTS_NEED)
        for kind in ("weighted", "sparse")
        for combiner in ("max", "none")
    ],
    *[
        ("rule", f"{rule} {untouched}", "shard", shard, BY_COLUMNS)
        for rule in ("RowwiseAdagrad", "RowwiseAdam")
        for untouched in ("lazy", "exact")
        for shard in ("column", "grid")
    ],
]
"""What cannot be together, and why."""


def allowed(one: Choice, other: Choice) -> bool:
    return not any((*one, *other) == r[:4] or (*other, *one) == r[:4] for r in REFUSED)


def possible(case: Mapping[str, Any]) -> bool:
    return not any(case[r[0]] == r[1] and case[r[2]] == r[3] for r in REFUSED)


class Training(NamedTuple):
    """A case with all that it leaves open: one table, its features and its optimizer."""

    name: str
    case: Mapping[str, Any]
    dim: int
    int32: bool
    """Ids, where they are no larger."""

    @classmethod
    def of(cls, number: int, case: Mapping[str, Any], chance: random.Random) -> Training:
        return cls(f"t{number}", case, chance.choice(DIMS), chance.random() < 0.3)

    @property
    def dynamic(self) -> bool:
        return bool(self.case["ids"] == "dynamic")

    @property
    def tiered(self) -> bool:
        return self.case["place"] in ("ssd", "three tiers")

    @property
    def fails_to_tell_states(self) -> bool:
        """See test_states_are_told_where_untouched_rows_decay."""
        return self.tiered and not self.dynamic and self.case["rule"].endswith("exact")

    @property
    def features(self) -> dict[str, str]:
        """Each with its kind of input."""
        kind = self.case["input"]
        if kind == "shared":
            return {f"{self.name}-bags": "ragged", f"{self.name}-one": "one-hot"}
        return {self.name: "ragged" if kind == "empty rank" else kind}

    @property
    def pool(self) -> list[int]:
        """Ids that come, without the padding."""
        if not self.dynamic:
            return [n for n in range(ROWS) if n != self.padding]
        if self.case["input"] == "sparse":  # whose ids are numbers of columns
            return [n * 2**33 + 1 for n in range(POOL)]
        return [(n - POOL // 2) * 2**33 + 1 for n in range(POOL)]

    @property
    def padding(self) -> int | None:
        if not self.case["padding"]:
            return None
        if not self.dynamic:
            return ROWS - 1
        return 7 if self.case["input"] == "sparse" else -7

    def sums_in_parts(self, kind: str) -> bool:
        """True if owners of some rows each may sum a bag, of which the page says that it rounds."""
        several = self.case["world"] + self.case["hosts"] > 1
        by_row = several and self.case["shard"] in ("row", "modulo", "grid")
        pooled = self.case["combiner"] in ("sum", "mean", "sqrtn")
        return by_row and pooled and kind not in ("one-hot", "weighted", "sparse")

    @property
    def table(self) -> hb.Table:
        return hb.Table(
            self.name,
            self.dim,
            None if self.dynamic else ROWS,
            self.case["combiner"],
            getattr(torch, self.case["dtype"]),
            padding_idx=self.padding,
        )

    @property
    def sharding(self) -> Sharding:
        world = self.case["world"] + self.case["hosts"]
        match self.case["shard"]:
            case "first":
                return TableWise(0)
            case "last":
                return TableWise(world - 1)
            case "row":
                return RowWise(owners=(world - 1, 0) if self.int32 and world > 1 else None)
            case "modulo":
                return RowWise("modulo")
            case "column":  # in falling order, the first the widest
                widths = [self.dim - world + 1, *[1] * (world - 1)]
                return ColumnWise(tuple(reversed(range(world))), tuple(widths))
            case "grid":  # of groups of other sizes, the ranks of the first not side by side
                groups = [tuple(range(group, world, 2)) for group in range(min(2, world))]
                return GridWise(tuple(groups), "modulo" if self.int32 else None)
        return Replicated()

    def optimizer(self, parameters: Any) -> Any:
        rule, untouched = self.case["rule"].split()
        kind = getattr(hb.optim, rule)
        return kind(parameters, lr=0.0625, untouched=untouched, **OPTIONS[rule])


class Bag(NamedTuple):
    ids: list[int]
    weights: list[float]


WEIGHTS: dict[str, list[list[float]]] = {
    "sum": [[0.5], [1.5, -2], [1, 1, 0.25], [0, 3, 1, -1, 2]],
    "mean": [[2], [1.5, 0.5], [1, 0.5, 0.5], [0.25, 0.25, 0.5, 1]],
    "sqrtn": [[2], [1, 1, 1, 1], [0.5, 0.5, 0.5, 0.5], [3, 2, 1, 1, 1]],
}
COUNTS = {"mean": [1, 2, 4], "sqrtn": [1, 4]}
"""Of bags without weights; by other combiners 1 to 5."""


def bags_of(training: Training, kind: str, size: int, chance: random.Random) -> list[Bag]:
    pool, padding, combiner = training.pool, training.padding, training.case["combiner"]
    bags = []
    for at_bag in range(size):
        first = at_bag == 0  # has an id: see test_a_step_counts_where_no_rank_has_ids
        if kind in ("weighted", "sparse"):
            weights = list(map(float, chance.choice(WEIGHTS[combiner])))
        else:
            counts = COUNTS.get(combiner, [1, 2, 3, 4, 5])
            count = 4 if kind == "fixed" else chance.choice(counts)
            if kind == "one-hot":
                count = 1
            if kind == "fixed" and padding is not None:
                count = chance.choice([*(n for n in counts if n <= 4), *([] if first else [0])])
            weights = [1.0] * count
        if kind == "empty bags" and not first and chance.random() < 0.6:
            weights = []
        ids = chance.sample(pool, len(weights))
        if kind == "ragged" and len(ids) > 1:
            ids[0] = ids[1]  # twice in one bag
        if padding is not None:
            extra = 4 - len(ids) if kind == "fixed" else chance.choice([0, 0, 1, 2])
            if kind == "one-hot":
                ids, extra = ([padding], 0) if extra and not first else (ids, 0)
            for _ in range(1 if kind == "sparse" and extra else extra):
                at = chance.randint(0, len(ids))
                ids.insert(at, padding)
                weights.insert(at, 3.0)
        bags.append(Bag(ids, weights))
    return bags


def input_of(training: Training, kind: str, bags: Sequence[Bag], number: int) -> Any:
    """What a collection takes for these bags in step `number`."""
    flat = [each for bag in bags for each in bag.ids]
    small = training.int32 and not training.dynamic
    ids = torch.tensor(flat, dtype=torch.int32 if small else torch.int64)
    if kind == "one-hot":
        return ids
    if kind == "fixed":
        return ids.view(-1, 4)
    lengths = torch.tensor([len(bag.ids) for bag in bags], dtype=torch.int64)
    if kind not in ("weighted", "sparse"):
        return hb.Jagged(ids, lengths=lengths)
    weights = torch.tensor([w for bag in bags for w in bag.weights])
    if kind == "weighted":
        return hb.Jagged(ids, lengths=lengths, weights=weights.requires_grad_())
    shape = (len(bags), max(training.pool) + 10 if training.dynamic else ROWS)
    if number % 2:
        samples = torch.repeat_interleave(torch.arange(len(bags)), lengths)
        return torch.sparse_coo_tensor(
            torch.stack([samples, ids.long()]), weights, shape, check_invariants=False
        )
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return torch.sparse_csr_tensor(offsets, ids.long(), weights, shape, check_invariants=False)


def values_of(output: Any) -> torch.Tensor:
    return output.values if isinstance(output, hb.Jagged) else output


def part_of(output: Any, bags: Sequence[Bag], samples: slice) -> torch.Tensor:
    """Of vectors for all `bags` those of some samples."""
    if not isinstance(output, hb.Jagged):
        return output[samples]
    begin, end = (sum(len(bag.ids) for bag in bags[:at]) for at in (samples.start, samples.stop))
    return output.values[begin:end]


def samples_of(rank: int, world: int, number: int, uneven: bool) -> slice:
    """Of `BATCH`. `uneven`: each rank in its turn has none, and the others more."""
    if not uneven:
        return slice(BATCH * rank // world, BATCH * (rank + 1) // world)
    shares = [0 if r == number % world else 1 + r for r in range(world)]
    cuts = [BATCH * sum(shares[:r]) // sum(shares) for r in range(world + 1)]
    return slice(cuts[rank], cuts[rank + 1])
