"""What `Embedding` and `EmbeddingBag` share: a module with one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hotbed import init as initializers
from hotbed.errors import TableError
from hotbed.handles import LiveTable, copy_table, derive_key, refuse_conversion
from hotbed.inputs import Bags
from hotbed.resolve.lookup import lookup
from hotbed.tables import Table

__all__ = ["OneTable", "check_given", "refuse_options", "reset", "shape_of"]


class OneTable(nn.Module):
    """A module with one table, whose handle is its parameter ``weight``."""

    _live: LiveTable

    def _make(
        self,
        kind: str,
        num_embeddings: int | None,
        embedding_dim: int,
        combiner: str,
        padding_idx: int | None,
        dtype: torch.dtype | None,
        init: initializers.Initializer | None,
        device: Any,
        requires_grad: bool = True,
    ) -> None:
        if device is not None and torch.device(device).type != "cpu":
            raise TableError(
                f"hotbed.{kind}: device={device!r} cannot be honoured; tables are on the CPU."
            )
        if padding_idx is not None and num_embeddings is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise TableError(
                    f"hotbed.{kind}: padding_idx {padding_idx} is outside "
                    f"[-{num_embeddings}, {num_embeddings})."
                )
            padding_idx %= num_embeddings
        spec = Table(
            kind.lower(),
            embedding_dim,
            num_embeddings,
            combiner,
            dtype or torch.get_default_dtype(),
            init or initializers.Normal(0.0, 1.0),
            padding_idx,
        )
        self._set(LiveTable(spec, derive_key(None, spec.name), requires_grad=requires_grad))

    def _set(self, live: LiveTable) -> None:
        object.__setattr__(self, "_live", live)
        self._parameters["weight"] = live.parameter

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and "_live" in self.__dict__:
            self._assign_weight(value)
            return
        super().__setattr__(name, value)

    def _assign_weight(self, value: Tensor) -> None:
        live = self._live
        if live.spec.rows is None:
            raise TableError(
                "The weight of a dynamic table cannot be assigned; it has a row for each id that was "
                "met. Use a state_dict, or collection.assign(table, ids, values)."
            )
        if value.shape != (live.spec.rows, live.spec.dim):
            raise TableError(
                f"weight must have shape ({live.spec.rows}, {live.spec.dim}), got {tuple(value.shape)}."
            )
        live.assign(live.ids(), value)
        if isinstance(value, nn.Parameter):
            live.parameter.requires_grad_(value.requires_grad)

    @property
    def num_embeddings(self) -> int | None:
        """Rows, or None for a dynamic table."""
        return self._live.spec.rows

    @property
    def embedding_dim(self) -> int:
        return self._live.spec.dim

    @property
    def padding_idx(self) -> int | None:
        return self._live.spec.padding_idx

    def _lookup(self, bags: Bags) -> Tensor:
        live = self._live
        out = lookup([live], [live.core], [0], [live.name], [bags], self)[0]
        return out if out.dtype == live.spec.dtype else out.to(live.spec.dtype)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._live.save(destination, prefix, "weight", keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        self._live.load(state_dict, prefix, "weight", missing_keys, error_msgs)
        known = {"weight", "weight_ids", "weight_key"}
        if strict:
            unexpected_keys.extend(
                k for k in state_dict if k.startswith(prefix) and k[len(prefix) :] not in known
            )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        refuse_conversion(self._live, fn)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = type(self).__new__(type(self))
        nn.Module.__init__(copied)
        memo[id(self)] = copied
        for name, value in self.__dict__.items():
            if name not in ("_live", "_parameters"):
                object.__setattr__(copied, name, value)
        copied._set(copy_table(self._live))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        state: dict[str, Any] = {}
        self._save_to_state_dict(state, "", False)
        live = self._live
        plain = {k: v for k, v in self.__dict__.items() if k not in ("_live", "_parameters")}
        return _rebuild, (
            type(self),
            live.spec,
            live.key,
            live.parameter.requires_grad,
            plain,
            state,
        )


def _rebuild(
    cls: Any,
    spec: Table,
    key: int,
    requires_grad: bool,
    plain: dict[str, Any],
    state: dict[str, Any],
) -> Any:
    made = cls.__new__(cls)
    nn.Module.__init__(made)
    for name, value in plain.items():
        object.__setattr__(made, name, value)
    made._set(LiveTable(spec, key, requires_grad=requires_grad))
    made.load_state_dict(state)
    return made


def refuse_options(kind: str, max_norm: float | None, scale_grad_by_freq: bool) -> None:
    """Raises for the two options of torch's layers that rewrite rows or gradients."""
    if max_norm is not None:
        raise TableError(
            f"{kind}: max_norm={max_norm} cannot be honoured, it would rewrite rows during a forward. "
            "Clip after the step, or use weight_decay."
        )
    if scale_grad_by_freq:
        raise TableError(
            f"{kind}: scale_grad_by_freq=True cannot be honoured; duplicates always sum their gradients."
        )


def check_given(kind: str, weight: Tensor, rows: int | None, dim: int) -> None:
    if tuple(weight.shape) != (rows, dim):
        raise TableError(
            f"{kind}: _weight has shape {tuple(weight.shape)}, the arguments say ({rows}, {dim})."
        )


def shape_of(embeddings: Tensor) -> tuple[int, int]:
    if embeddings.dim() != 2:
        raise TableError(
            f"from_pretrained needs (rows, dim) weights, got {tuple(embeddings.shape)}."
        )
    return embeddings.shape[0], embeddings.shape[1]


def reset(live: LiveTable) -> None:
    live.key = derive_key(None, live.name)
    live.core.set_key(live.key)
    if live.spec.rows is None:
        live.core.clear()
    else:
        live.settle(live.ids())
        live.core.write_first_values()
