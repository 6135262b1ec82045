"""A model of pytorch-widedeep, as its users make one."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torchmetrics  # noqa: F401  # which asks for torchvision itself
from torch import Tensor


class _Anything(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Unused:
    """Finds what it imports for texts and images, which are not used here."""

    parts = ("cv2", "gensim", "sentence_transformers", "spacy", "torchvision", "transformers")

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.split(".")[0] in self.parts and name not in sys.modules:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


_of_others = {
    name: module for name, module in sys.modules.items() if name.startswith(_Unused.parts)
}
for _name in _of_others:
    del sys.modules[_name]
sys.meta_path.insert(0, _Unused())
try:
    from pytorch_widedeep.models import TabMlp, Wide, WideDeep
finally:
    del sys.meta_path[0]
    for _name in [name for name in sys.modules if name.startswith(_Unused.parts)]:
        del sys.modules[_name]
    sys.modules.update(_of_others)

ROWS, DIM = 20_000, 8
COLUMNS = ["C0", "C1", "C2", "C3"]


def wide_deep() -> Any:
    places = {name: place for place, name in enumerate([*COLUMNS, "I1"])}
    deep = TabMlp(
        column_idx=places,
        cat_embed_input=[(name, ROWS, DIM) for name in COLUMNS],
        continuous_cols=["I1"],
        mlp_hidden_dims=[16],
        mlp_dropout=0.0,
    )
    return WideDeep(wide=Wide(input_dim=4 * ROWS), deeptabular=deep)


def batch(number: int, samples: slice = slice(0, 32)) -> tuple[dict[str, Tensor], Tensor]:
    draw = torch.Generator().manual_seed(number)
    ids = torch.randint(1, ROWS + 1, (32, 4), generator=draw)[samples]
    number_column = torch.rand(32, 1, generator=draw)[samples]
    x = {
        "wide": ids + torch.arange(4) * ROWS,
        "deeptabular": torch.cat([ids.float(), number_column], 1),
    }
    return x, torch.randint(0, 2, (32, 1), generator=draw).float()[samples]


def loss(model: Any, given: tuple[dict[str, Tensor], Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(given[0]), given[1])
