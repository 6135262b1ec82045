"""Whether a checkpoint is of the model that a bundle was made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hotbed.checkpoint.entries import Manifest, ModelEntry
from hotbed.checkpoint.entries import TableEntry as SavedTable
from hotbed.serve.bundles.bundle import Bundle, BundleError, FirstEntry
from hotbed.serve.bundles.dense_weights import shapes_of

__all__ = ["refuse_other_model"]

_MOST_NAMED = 3


def refuse_other_model(
    bundle: Bundle, folder: str, manifest: Manifest, state: Mapping[str, object]
) -> None:
    """Raise BundleError, which names what differs, where a checkpoint is of another model than a bundle.

    Args:
        folder: of the checkpoint.
        state: its state_dict without tables.
    """
    faults = [
        *_models_differ(bundle["model"], manifest.get("model")),
        *_tables_differ(bundle, manifest),
        *_tensors_differ(bundle.get("state_dict", {}), shapes_of(state)),
    ]
    if faults:
        more = f" and {len(faults) - _MOST_NAMED} more" if len(faults) > _MOST_NAMED else ""
        raise BundleError(
            f"{folder} is of another model than the bundle: {'; '.join(faults[:_MOST_NAMED])}{more}. Export "
            "a bundle of it."
        )


def _models_differ(own: ModelEntry | None, other: ModelEntry | None) -> Iterator[str]:
    if own is None or other is None:
        return
    if own["name"] != other["name"]:
        yield f"it is {other['name']}, and the bundle {own['name']}"
        return
    mine, theirs = ({**each["arguments"], "schema": each.get("schema")} for each in (own, other))
    for name in sorted({*mine, *theirs}):
        if mine.get(name) != theirs.get(name):
            yield f"{name} of {own['name']} differs"


def _tables_differ(bundle: Bundle, manifest: Manifest) -> Iterator[str]:
    combiners = {
        each["table"]: (each["combiner"], each["padding_idx"]) for each in bundle["lookups"]
    }
    for stem, own in bundle["tables"].items():
        if stem not in manifest["tables"]:
            yield f"it has no table {stem!r}"
            continue
        other = manifest["tables"][stem]
        rows = own["rows"] if own["static"] else None
        if (own["dim"], rows) != (other["dim"], other["rows"]):
            yield (
                f"table {stem!r} has dim={other['dim']} and rows={other['rows']}, and dim={own['dim']} and "
                f"rows={rows} in the bundle"
            )
        pooled = other["combiner"], other["padding_idx"]
        if other["combiner"] is not None and stem in combiners and combiners[stem] != pooled:
            yield f"table {stem!r} has another combiner or padding_idx"
        if "first" in own and _starts_otherwise(own["first"], other):
            yield f"table {stem!r} has other first values"


def _starts_otherwise(own: FirstEntry, other: SavedTable) -> bool:
    if other["key"] is None:  # of a table that was made elsewhere
        return False
    return (own["key"], own["init"], own["padding_idx"], own["dtype"]) != (
        other["key"],
        other["init"],
        other["padding_idx"],
        other["dtype"],
    )


def _tensors_differ(own: Mapping[str, str], other: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*own, *other}):
        if own.get(name) != other.get(name):
            mine, theirs = (each.get(name, "not there") for each in (own, other))
            yield f"the tensor {name!r} is {theirs}, and {mine} in the bundle"
