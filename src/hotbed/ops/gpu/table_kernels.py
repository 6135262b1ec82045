"""TableKernels of device planes: forward, backward and optimizer step of a batch, whose ids are slots.

What a device tier needs: it resolves ids to slots, hands the batch to `TableKernels`, and has every row
moved on the device. No call waits for the device, and what a batch turns out to be (how many slots,
whether its gradient is finite) stays there.

    kernels = TableKernels(planes)
    batch = kernels.forward(features)                   # batch.outputs: (bags, dim) a feature
    index = kernels.transpose(features)                 # any time before backward, on any stream
    gradient = kernels.backward(batch, grads, index)
    kernels.update(gradient, rules, apply=apply)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hotbed import _core
from hotbed.errors import InputError
from hotbed.ops.gpu.finite import check_finite
from hotbed.ops.gpu.pool import FeatureSlots, check_features, pool, pool_into
from hotbed.ops.gpu.reduce import reduce, sum_chunks
from hotbed.ops.gpu.rules import ROW_RULES, rule_of
from hotbed.ops.gpu.terms import Terms, gradient_terms
from hotbed.ops.gpu.transpose import TransposedIndex, transpose
from hotbed.ops.gpu.update import DevicePlanes, RowsToUpdate, update
from hotbed.ops.gpu.weight_gradients import weight_gradients

__all__ = ["DeviceBatch", "TableKernels", "Step"]


@dataclass(frozen=True, kw_only=True)
class DeviceBatch:
    """A batch that was looked up.

    Args:
        features: its input.
        outputs: (bags, dim) a feature.
        inverses: for each feature that is divided, 1 / what its bags were divided by.
    """

    features: tuple[FeatureSlots, ...]
    outputs: list[Tensor]
    inverses: list[Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One table's rule at one step, which counts from 1."""

    options: _core.RuleOptions
    hyper: _core.Hyperparameters
    step: int


class TableKernels:
    """Tables on one device.

    Threading: calls are ordered by the current stream of the device; two threads that use one
    TableKernels at a time are not. Tensors that a call was given must live until the stream has passed it.
    """

    def __init__(self, tables: Sequence[DevicePlanes]) -> None:
        self.tables = tuple(tables)
        self.weights = [table.weights for table in self.tables]
        self.dims = [weights.shape[1] for weights in self.weights]

    def forward(
        self,
        features: Sequence[FeatureSlots],
        dtype: torch.dtype = torch.float32,
        outputs: list[Tensor] | None = None,
    ) -> DeviceBatch:
        """Pools every feature; features of as many bags are columns of one buffer.

        Args:
            outputs: where to write the vectors of each feature instead, as for `pool_into`.

        Raises:
            InputError: as `pool`.
        """
        check_features(self.weights, features)
        inverses = [
            torch.empty(f.bags, device=f.slots.device) if f.divided else None for f in features
        ]
        if outputs is None:
            outputs = pool(self.weights, features, dtype, inverses)
        else:
            pool_into(self.weights, features, outputs, inverses)
        return DeviceBatch(features=tuple(features), outputs=outputs, inverses=inverses)

    def transpose(self, features: Sequence[FeatureSlots]) -> TransposedIndex:
        """The transposed index that the backward of these features takes."""
        return transpose(features, [weights.shape[0] for weights in self.weights])

    def backward(
        self,
        batch: DeviceBatch,
        grads: Sequence[Tensor | None],
        index: TransposedIndex | None = None,
    ) -> Terms:
        """The gradient of the batch's rows, as terms that `reduce` or `update` sums.

        Args:
            grads: (bags, dim) for each output, of one dtype; or None: it took no part.
            index: of the batch's features, if it was built before.

        Raises:
            InputError: as `gradient_terms`.
        """
        if index is None:
            index = self.transpose(batch.features)
        return self.terms(index, batch.features, grads, batch.inverses)

    def terms(
        self,
        index: TransposedIndex,
        features: Sequence[FeatureSlots],
        grads: Sequence[Tensor | None],
        inverses: Sequence[Tensor | None] | None = None,
    ) -> Terms:
        """The same for features that were not looked up here, such as rows of gradients by slot."""
        terms = gradient_terms(index, features, grads, self.dims, inverses)
        sum_chunks(terms)
        return terms

    def weight_gradients(
        self, batch: DeviceBatch, grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The gradient of each feature's weights; before `update` changes the rows."""
        return weight_gradients(self.weights, batch.features, grads, batch.outputs, batch.inverses)

    def update(
        self,
        terms: Terms,
        steps: Sequence[Step | None],
        *,
        fused: bool = True,
        apply: Tensor | None = None,
    ) -> None:
        """Takes a step of every table whose gradient `terms` holds.

        Args:
            terms: from `backward`.
            steps: for each table its rule and numbers, or None: it stays.
            fused: sum the gradient on the way, where the rule allows it. Then what `apply` tells
                is whether the gradients of the bags are finite, not their sums.
            apply: (1,) int32 on the device, 1 or 0. Where it is 0, or a gradient is not finite,
                which sets it to 0, no table changes. None: nothing is checked.

        Raises:
            InputError: as `update`; or the steps are not one a table.
        """
        flags = None if apply is None else [apply] * len(self.tables)
        update(self.shares(terms, steps, flags, fused=fused), terms, apply)

    def shares(
        self,
        terms: Terms,
        steps: Sequence[Step | None],
        flags: Sequence[Tensor] | None = None,
        *,
        fused: bool = True,
    ) -> list[RowsToUpdate]:
        """Return the work of a step, with gradients checked and nothing changed; for `update`.

        Args:
            flags: for each table (1,) int32, set to 0 where its gradient is not finite.
        """
        if len(steps) != len(self.tables):
            raise InputError(
                f"update: {len(steps)} steps for {len(self.tables)} tables. Pass one a table, or None."
            )
        taken = {t: step for t, step in enumerate(steps) if step is not None}
        summed = [
            t for t, s in taken.items() if not fused or rule_of(s.options, s.hyper) in ROW_RULES
        ]
        if flags is not None:
            checked = [
                (grad, flags[t])
                for grad, t in zip(terms.grads, terms.grad_tables, strict=True)
                if t in taken and t not in summed
            ]
            check_finite([grad for grad, _ in checked], [flag for _, flag in checked])
        own = None if flags is None else [flags[t] for t in summed]
        rows = dict(zip(summed, reduce(terms, own, summed), strict=True)) if summed else {}
        return [
            RowsToUpdate.of_index(
                terms, t, self.tables[t], step.options, step.hyper, step.step, rows.get(t)
            )
            for t, step in taken.items()
        ]
