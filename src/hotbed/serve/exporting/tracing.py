"""Models as their dense part, compared with them: what is written as a bundle."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hotbed.jagged import Jagged
from hotbed.serve.bundles.bundle import ExportError
from hotbed.serve.bundles.sessions import Session, session_of
from hotbed.serve.exporting.asking import check_samples, samples_at
from hotbed.serve.exporting.comparing import TOLERANCE, apart
from hotbed.serve.exporting.dense import (
    Leaves,
    leaves_of,
    named_outputs,
    onnx_of,
    parameters_of,
    program_of,
)
from hotbed.serve.exporting.lookups import Recorded, WithoutTables, recorded
from hotbed.serve.exporting.onnx_nodes import OnnxModel

__all__ = ["Traced", "answered_by", "traced_of"]

_TOLERANCES = {torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""In place of `TOLERANCE` where such numbers are computed with: five times what one is rounded by."""


class Traced(NamedTuple):
    """A model's dense part, and what it was made of."""

    leaves: Leaves
    found: Recorded
    exported: torch.export.ExportedProgram
    onnx: OnnxModel
    session: Session
    difference: float
    parameters: dict[str, str]


def traced_of(model: nn.Module, args: tuple[object, ...]) -> Traced:
    """Trace a model, in evaluation mode, and compare what ONNX answers with it."""
    bare = WithoutTables(model)
    bare.model.eval()
    leaves = leaves_of(model, args)
    before = {name: copy.deepcopy(leaf) for name, leaf in leaves.named.items()}
    found = recorded(bare, leaves.sample(leaves.named))
    for name, leaf in leaves.named.items():
        if not _is_alike(leaf, before[name]):
            raise ExportError(
                f"The model changes {name!r} of its batch, which a request does not have changed. Have it "
                "make a copy."
            )
    if not found.lookups:
        raise ExportError(
            "The model looks up nothing of this sample. A model without tables is exported by "
            "torch.onnx.export; of one that is compiled, give what was compiled; tables are found in "
            "parts of a model, not in lists or bound methods."
        )
    return _program(bare, leaves, found)


def _program(bare: WithoutTables, leaves: Leaves, found: Recorded) -> Traced:
    """Make the dense part of a forward. It is compared with that, and with one of all samples but the first,
    the last of them first."""
    outputs = named_outputs(found.outputs)
    count = len(found.lookups[0].vectors)
    check_samples("answers", outputs, count)
    check_samples("looks up", {each.name: each.vectors for each in found.lookups}, count)
    for name, each in outputs.items():
        if not bool(torch.isfinite(each).all()):
            raise ExportError(
                f"The model answers {name!r} of the sample with numbers that are not finite."
            )
    traced = program_of(bare, found.lookups, leaves)
    onnx = onnx_of(traced, [*outputs])
    taken = {each.name for each in onnx.graph.input}
    check_samples(
        "is asked with", {name: leaves.named[name] for name in taken & {*leaves.named}}, count
    )
    try:
        session = session_of(onnx.SerializeToString())
    except ImportError:
        raise
    except Exception as error:  # onnxruntime's have no base of their own
        raise ExportError(f"onnxruntime cannot run the dense part: {error}") from error
    bound = _TOLERANCES.get(_narrowest([*bare.model.parameters(), *outputs.values()]), TOLERANCE)
    difference = 0.0
    for at in (torch.arange(count), torch.arange(count - 1, 0, -1)):
        part = {name: samples_at(leaf, at, count) for name, leaf in leaves.named.items()}
        again = found if len(at) == count else recorded(bare, leaves.sample(part))
        given = {name: leaf for name, leaf in part.items() if isinstance(leaf, Tensor)}
        given |= {lookup.input: lookup.vectors for lookup in again.lookups}
        wanted = named_outputs(again.outputs)
        for name, answer in answered_by(session, given, [*wanted]).items():
            away = apart(answer, wanted[name])
            difference = max(difference, away)
            if not away <= bound:
                raise ExportError(
                    f"The dense part answers {name!r} otherwise than the model, by {away:.3g}, with "
                    f"{len(at)} of {count} samples. Is something random, or fixed to how many there are?"
                )
            if not apart(wanted[name], outputs[name][at.to(outputs[name].device)]) <= bound:
                raise ExportError(
                    f"The model answers {name!r} of a sample otherwise where there are others beside it, "
                    "and a server answers several requests at once. Have each sample answered by itself."
                )
    parameters = parameters_of(traced, onnx)
    used = found._replace(lookups=[each for each in found.lookups if each.input in taken])
    if not used.lookups:
        raise ExportError("The model answers nothing that depends on what it looks up.")
    return Traced(leaves, used, traced.exported, onnx, session, difference, parameters)


def _narrowest(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return the type of floating-point numbers with the fewest bits."""
    dtypes = [each.dtype for each in tensors if each.is_floating_point()]
    return min(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)


def _is_alike(one: object, other: object) -> bool:
    if isinstance(one, Jagged) and isinstance(other, Jagged):
        return _is_alike(one.values, other.values) and _is_alike(one.offsets, other.offsets)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool(torch.equal(one.nan_to_num(), other.nan_to_num()))
    return True


def answered_by(
    session: Session, given: Mapping[str, object], names: Sequence[str]
) -> dict[str, Tensor]:
    """Return what onnxruntime answers. `given`: by name what it takes, and other things."""
    fed = {}
    for each in session.get_inputs():
        tensor = given[each.name]
        assert isinstance(tensor, Tensor)
        fed[each.name] = tensor.detach().cpu().numpy()
    answers = session.run([*names], fed)
    return {name: torch.from_numpy(each) for name, each in zip(names, answers, strict=True)}
