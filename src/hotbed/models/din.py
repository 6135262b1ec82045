"""DIN: a candidate, and those items of a user's history that have to do with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from hotbed.arrays import id_tensor
from hotbed.data import Schema
from hotbed.errors import InputError, TableError
from hotbed.jagged import Jagged
from hotbed.models.click import ClickModel
from hotbed.models.registry import register
from hotbed.models.settings import ModelSettings
from hotbed.nn import Dice, TargetAttention

__all__ = ["DIN", "DINSettings"]


@dataclasses.dataclass(frozen=True)
class DINSettings(ModelSettings):
    """Settings of `DIN`."""

    num_dense: int = 0
    """Columns of ``batch["dense"]``."""
    target: tuple[str, ...] = ("item",)
    """Features of the candidate, one for each of `history`."""
    history: tuple[str, ...] = ("history",)
    """Features with a user's items, (B, L) each, the table's padding_idx where there are fewer."""
    attention: tuple[int, ...] = (80, 40)
    """Widths of the hidden layers that weigh an item."""
    hidden: tuple[int, ...] = (200, 80)
    """Widths of the MLP's hidden layers."""
    activation: str = "dice"
    """Of the MLP: "dice", which has the statistics of a batch in it, "prelu" or "relu"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.history
        if not names or len(self.target) != len(names) or len({*names}) < len(names):
            raise TableError(
                f"DIN: target is {list(self.target)} and history {list(names)}. Name each history once, and "
                "the candidate's feature for it, as in target=['item'], history=['seen']."
            )
        if min((1, *self.hidden)) < 1:
            raise TableError(f"DIN: hidden is {list(self.hidden)}. Pass positive integers.")
        if self.activation not in _ACTIVATIONS:
            raise TableError(
                f"DIN: activation is {self.activation!r}. Pass one of {', '.join(_ACTIVATIONS)}."
            )


_ACTIVATIONS: dict[str, Callable[[int], nn.Module]] = {
    "dice": Dice,
    "prelu": lambda width: nn.PReLU(),
    "relu": lambda width: nn.ReLU(),
}


@register("din")
class DIN(ClickModel):
    """Deep interest network (Zhou et al., arXiv:1706.06978).

    Items of a user's history are weighed by what they have to do with the candidate, and summed; an MLP
    sees the dense columns, the vectors of all other features and these sums side by side. A history and its
    target share a table, which has ``padding_idx=-1`` and no combiner::

        hb.models.DIN(
            [hb.Table("item", 16, combiner=None, padding_idx=-1), "user"],
            features={"item": "item", "history": "item", "user": "user"},
        )

    Arguments are those of `ClickModel`.
    """

    Settings = DINSettings
    settings: DINSettings

    @classmethod
    def settings_of(cls, schema: Schema) -> dict[str, object]:
        histories = schema.histories()
        for name, sharing in histories.items():
            if len(sharing) != 1:
                table, given = schema.features[name], ", ".join(map(repr, sharing)) or "none"
                raise TableError(
                    f"DIN: sequence {name!r} needs one feature of the candidate with its table {table!r}; "
                    f"the schema has {given}. Give one column that table."
                )
        target = [name for (name,) in histories.values()]
        return {"num_dense": len(schema.numbers), "target": target, "history": list(histories)}

    def make_layers(self) -> None:
        settings = self.settings
        self.interests = dict(zip(settings.history, settings.target, strict=True))
        """Features of candidates, by those of histories."""
        self.padding = {name: self._padding(name) for name in self.interests}
        """Id that fills up a history, by its feature."""
        self.attention = nn.ModuleList(
            TargetAttention(self.dim, settings.attention) for _ in self.interests
        )
        layers, before = list[nn.Module](), self.width
        for width in settings.hidden:
            layers += [nn.Linear(before, width), _ACTIVATIONS[settings.activation](width)]
            before = width
        self.deep = nn.Sequential(*layers, nn.Linear(before, 1))

    def _padding(self, history: str) -> int:
        target, tables = self.interests[history], {table.name: table for table in self.described}
        shared = self.table_of.get(history)
        if shared is None or shared != self.table_of.get(target):
            raise TableError(
                f"DIN: target {target!r} and history {history!r} must be features that share a table, as in "
                f"features={{{target!r}: 'item', {history!r}: 'item'}}."
            )
        if (padding := tables[shared].padding_idx) is None or tables[shared].combiner != "none":
            raise TableError(
                f"DIN: table {shared!r}, of history {history!r}, needs padding_idx=-1 and combiner=None, so "
                "that histories of any length give a vector an item."
            )
        return padding

    def _mask(self, history: str, ids: object) -> Tensor:
        """Return bool (B, L), True for items."""
        if isinstance(ids, Jagged):
            raise InputError(
                f"DIN: history {history!r} is Jagged. Pass (B, L) ids, padding_idx where there are fewer."
            )
        return id_tensor(f"Feature {history!r}", ids) != self.padding[history]

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        vectors, _ = self.look_up(batch)
        named = dict(zip(self.features, vectors, strict=True))
        attention = dict(zip(self.interests, self.attention, strict=True))
        columns = []
        for name, vector in named.items():
            if name in attention:
                mask = self._mask(name, batch[name])
                vector = attention[name](named[self.interests[name]], vector, mask)
            elif isinstance(vector, Jagged) or vector.dim() != 2:
                raise InputError(
                    f"DIN: feature {name!r} has more than a vector a sample. Pass one id a sample, (B,), "
                    "name it in history, or give its table a combiner."
                )
            columns.append(vector)
        logits: Tensor = self.deep(self.side_by_side(batch, columns)).squeeze(1)
        return logits
