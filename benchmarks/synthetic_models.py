"""NVIDIA's synthetic models: tables, inputs and layers, as plain descriptions.

From `examples/benchmarks/synthetic_models/config_v3.py` of NVIDIA-Merlin/distributed-embeddings. All
tables pool by sum. The vectors of all inputs are joined (and, in the larger models, averaged over
neighbouring columns), the numerical features put beside them, and a ReLU MLP that ends in one
logit follows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["MODELS", "SyntheticModel", "TableGroup", "synthetic_model"]

K, M, G = 10**3, 10**6, 10**9


@dataclass(frozen=True)
class TableGroup:
    """`tables` tables of `rows` x `dim`, each with one input for every entry of `hotness`."""

    tables: int
    rows: int
    dim: int
    hotness: tuple[int, ...] = (1,)
    """Ids a bag of each input. Two inputs share their table."""

    @property
    def shared(self) -> bool:
        """Whether a table has several inputs."""
        return len(self.hotness) > 1


@dataclass(frozen=True)
class SyntheticModel:
    """One model: groups of tables in the order of the definition, and its dense part."""

    name: str
    groups: tuple[TableGroup, ...]
    mlp: tuple[int, ...]
    """Widths of the hidden layers; one logit follows."""
    numerical: int
    """Columns of numerical features, uniform in [0, 100)."""
    stride: int | None = None
    """Joined vectors are averaged over this many neighbouring columns."""

    @property
    def tables(self) -> int:
        return sum(group.tables for group in self.groups)

    @property
    def inputs(self) -> int:
        return sum(group.tables * len(group.hotness) for group in self.groups)

    @property
    def rows(self) -> int:
        return sum(group.tables * group.rows for group in self.groups)

    @property
    def parameters(self) -> int:
        """Weights of all tables."""
        return sum(group.tables * group.rows * group.dim for group in self.groups)

    @property
    def lookups(self) -> int:
        """Ids a sample."""
        return sum(group.tables * sum(group.hotness) for group in self.groups)

    @property
    def gathered(self) -> int:
        """Weights read a sample, were nothing read twice."""
        return sum(group.tables * sum(group.hotness) * group.dim for group in self.groups)

    @property
    def width(self) -> int:
        """Columns of the joined vectors."""
        return sum(group.tables * len(group.hotness) * group.dim for group in self.groups)

    @property
    def interaction_width(self) -> int:
        """Columns after averaging."""
        return self.width if self.stride is None else -(-self.width // self.stride)

    @property
    def mlp_input(self) -> int:
        return self.interaction_width + self.numerical

    @property
    def mlp_parameters(self) -> int:
        widths = (self.mlp_input, *self.mlp, 1)
        return sum((a + 1) * b for a, b in zip(widths[:-1], widths[1:], strict=True))

    def scaled(self, rows: int) -> SyntheticModel:
        """The same model with at most `rows` rows a table."""
        groups = tuple(replace(group, rows=min(group.rows, rows)) for group in self.groups)
        return replace(self, groups=groups)


def _model(
    name: str,
    shared: tuple[tuple[int, int, int, int], ...],
    one_hot: tuple[tuple[int, int, int], ...],
    mlp: tuple[int, ...],
    numerical: int,
    stride: int | None = None,
) -> SyntheticModel:
    """`shared`: (tables, rows, dim, hotness of the second input); `one_hot`: (tables, rows, dim)."""
    groups = [TableGroup(count, rows, dim, (1, hot)) for count, rows, dim, hot in shared]
    groups += [TableGroup(count, rows, dim) for count, rows, dim in one_hot]
    return SyntheticModel(name, tuple(groups), mlp, numerical, stride)


MODELS: dict[str, SyntheticModel] = {
    model.name: model
    for model in (
        _model("criteo", (), ((26, 100 * K, 128),), (512, 256, 128), 13),
        _model(
            "tiny",
            ((1, 10 * K, 8, 10), (1, M, 16, 10), (1, 25 * M, 16, 10)),
            (
                (1, 25 * M, 16),
                (16, 10, 8),
                (10, K, 8),
                (4, 10 * K, 8),
                (2, 100 * K, 16),
                (19, M, 16),
            ),
            (256, 128),
            10,
        ),
        _model(
            "small",
            ((5, 10 * K, 16, 30), (3, 4 * M, 32, 30), (1, 50 * M, 32, 30)),
            (
                (1, 50 * M, 32),
                (30, 10, 16),
                (30, K, 16),
                (5, 10 * K, 16),
                (5, 100 * K, 32),
                (27, 4 * M, 32),
            ),
            (512, 256, 128),
            10,
        ),
        _model(
            "medium",
            ((20, 100 * K, 64, 50), (5, 10 * M, 64, 50), (1, 100 * M, 128, 50)),
            (
                (1, 100 * M, 128),
                (80, 10, 32),
                (60, K, 32),
                (80, 100 * K, 64),
                (24, 200 * K, 64),
                (40, 10 * M, 64),
            ),
            (1024, 512, 256, 128),
            25,
            7,
        ),
        _model(
            "large",
            ((40, 100 * K, 64, 100), (16, 15 * M, 64, 100), (1, 200 * M, 128, 100)),
            (
                (1, 200 * M, 128),
                (100, 10, 32),
                (100, 10 * K, 32),
                (160, 100 * K, 64),
                (50, 500 * K, 64),
                (144, 15 * M, 64),
            ),
            (2048, 1024, 512, 256),
            100,
            8,
        ),
        _model(
            "jumbo",
            ((50, 100 * K, 128, 200), (24, 20 * M, 128, 200), (1, 400 * M, 256, 200)),
            (
                (1, 400 * M, 256),
                (100, 10, 32),
                (200, 10 * K, 64),
                (350, 100 * K, 128),
                (80, M, 128),
                (216, 20 * M, 128),
            ),
            (2048, 1024, 512, 256),
            200,
            20,
        ),
        _model(
            "colossal",
            ((100, 100 * K, 128, 300), (50, 40 * M, 256, 300), (1, 2 * G, 256, 300)),
            (
                (1, G, 256),
                (100, 10, 32),
                (400, 10 * K, 128),
                (100, 100 * K, 128),
                (800, M, 128),
                (450, 40 * M, 256),
            ),
            (4096, 2048, 1024, 512, 256),
            500,
            30,
        ),
    )
}


def synthetic_model(name: str) -> SyntheticModel:
    """The model of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in MODELS:
        raise ValueError(f"There is no synthetic model {name!r}. Pass one of {', '.join(MODELS)}.")
    return MODELS[name]
