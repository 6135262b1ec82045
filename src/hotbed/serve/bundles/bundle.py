"""Contents of a bundle: a folder from which a model answers.

::

    DIR/
        bundle.json              this, with the signature
        dense.onnx               the dense part
        standalone.onnx          dense part and tables as one model, if it was asked for
        dense.pt2                the same as a program of torch.export, if it was asked for
        sample.json              a request and its answer
        tables/N.ids.npy         of a dynamic table: ids, rising
        tables/N.rows.npy        rows, in the order of the ids
        tables/N.scales.npy      of rows in few bits: scale and offset of each
        tables/N.default.npy     the vector of an id without row, unless that reads first values
        tables/N.only.npy        of a dynamic table of which some ids were asked for: these, rising
        topk/user.onnx           of a two-tower model: the users' tower, divided by the temperature
        topk/item.onnx           the items' tower
        topk/ids.npy             ids of all items, rising
        topk/N.ids.npy           of the items' feature N, from 1 on: ids in the order of the items
        topk/N.offsets.npy       where items have any number of them: where those of each begin and end
        topk/vectors.npy         float32 vectors of the items, whose products with a user's are the scores
        versions/                newer versions, see `hotbed.serve.bundles.versions`
"""

from __future__ import annotations

from typing import TypedDict

from typing_extensions import NotRequired

from hotbed.checkpoint.entries import ModelEntry
from hotbed.errors import HotbedError
from hotbed.files import Json

__all__ = [
    "CRITEO",
    "DENSE",
    "FORMAT",
    "ITEM",
    "ITEM_IDS",
    "ITEM_VECTOR",
    "ITEM_VECTORS",
    "MANIFEST",
    "PROGRAM",
    "SAMPLE",
    "STANDALONE",
    "TABLES",
    "TOPK",
    "USER",
    "USER_VECTOR",
    "VERSION",
    "VERSIONS",
    "BundleError",
    "Bundle",
    "ExportError",
    "FileEntry",
    "FirstEntry",
    "InputEntry",
    "ItemFeatureEntry",
    "LookupEntry",
    "OutputEntry",
    "TableEntry",
    "TopKEntry",
    "TowersEntry",
    "is_of_a_bundle",
]

FORMAT, VERSION = "hotbed bundle", 1
MANIFEST, DENSE, PROGRAM, STANDALONE, SAMPLE, TABLES, VERSIONS = (
    "bundle.json",
    "dense.onnx",
    "dense.pt2",
    "standalone.onnx",
    "sample.json",
    "tables",
    "versions",
)
CRITEO = "criteo"
TOPK = "topk"
USER, ITEM = f"{TOPK}/user.onnx", f"{TOPK}/item.onnx"
ITEM_IDS, ITEM_VECTORS = f"{TOPK}/ids.npy", f"{TOPK}/vectors.npy"
USER_VECTOR, ITEM_VECTOR = f"{TOPK}/user", f"{TOPK}/item"
"""What the towers answer. (A feature may have the name user.)"""


def is_of_a_bundle(name: str) -> bool:
    """Return True for files of a bundle, by their paths in it."""
    return name in (MANIFEST, DENSE, PROGRAM, STANDALONE, SAMPLE) or name.partition("/")[0] in (
        TABLES,
        VERSIONS,
        TOPK,
    )


class BundleError(HotbedError, ValueError):
    """A folder is no bundle, or is damaged."""


class ExportError(HotbedError, ValueError):
    """A model cannot be exported as it is."""


class FileEntry(TypedDict):
    """A file of a bundle."""

    name: str
    """Path in the bundle, with slashes."""
    bytes: int
    crc32c: str
    """Of all of it, in eight hexadecimal digits."""


class BandEntry(TypedDict):
    """Consecutive columns that start from one distribution."""

    end: int
    """The column before which they end."""
    kind: str
    """Of `hotbed.init.Kind`."""
    numbers: list[float]
    """The distribution's four."""


class FirstEntry(TypedDict):
    """First values of the rows of a table: those of its training, see `hotbed.init`."""

    key: str
    """Of the table, in 16 hexadecimal digits."""
    init: dict[str, Json] | None
    """The table's initializer, as in checkpoints; None: one of the user's own."""
    bands: list[BandEntry]
    padding_idx: int | None
    """The row of this id is zeros."""
    dtype: str
    """Of the table in training, to which they are rounded."""


class TableEntry(TypedDict):
    """A table, as its rows lie in the bundle."""

    files: str
    """What their names begin with, such as tables/0."""
    dim: int
    rows: int
    """How many there are."""
    static: bool
    """True: ids are 0 to `rows` - 1. False: any int64; those without a row have the default vector."""
    stored_as: str
    """float32, float16, int8 or int4."""
    first: NotRequired[FirstEntry]
    """Of a dynamic table: ids without row read first values, and there is no file with their default."""


class InputEntry(TypedDict):
    """Something that is asked with."""

    name: str
    kind: str
    """ids or numbers."""
    dtype: str
    """NumPy's name."""
    shape: list[int]
    """Of one sample: [] a value, [k] so many; [-1] of ids: any number."""
    dense: bool
    """True: the dense part takes it, too, by this name."""


class LookupEntry(TypedDict):
    """Vectors that are looked up."""

    input: str
    """Whose ids."""
    table: str
    combiner: str
    """none, sum, mean, sqrtn or max."""
    padding_idx: int | None
    """This id is none."""
    vectors: str
    """The input of the dense part that takes them."""
    dtype: str
    """In which it takes them, and rows are combined."""


class OutputEntry(TypedDict):
    """Something that is answered."""

    name: str
    dtype: str
    shape: list[int]
    """Of one sample."""


class TopKEntry(TypedDict):
    """Items of a two-tower model, and with what a user is asked."""

    inputs: list[str]
    """Names of the inputs that are a user's."""
    items: int
    """How many there are."""
    width: int
    """Columns of their vectors."""


class ItemFeatureEntry(TypedDict):
    """A feature of the items, the first of which is their id."""

    input: str
    """By whose lookup its ids become vectors."""
    ids: int
    """How many all items have together."""
    bags: bool
    """True: an item has any number of them. False: one."""


class TowersEntry(TypedDict):
    """Describes how newer versions of a two-tower model are made."""

    user: dict[str, str]
    """As `parameters` of `Bundle`, of the users' tower."""
    item: dict[str, str]
    """Of the items' tower."""
    features: list[ItemFeatureEntry]
    """In the order in which the items' tower takes them."""


class Bundle(TypedDict):
    """The manifest."""

    format: str
    version: int
    model: ModelEntry | None
    """Of `hotbed.models`: name, arguments and, if there is one, schema."""
    model_version: str
    """What answers carry: of which training step they are, and another one for each bundle."""
    inputs: list[InputEntry]
    lookups: list[LookupEntry]
    outputs: list[OutputEntry]
    tables: dict[str, TableEntry]
    files: list[FileEntry]
    made_with: dict[str, str]
    """Versions of hotbed, torch and onnx, and the opset of ONNX."""
    largest_difference: float
    """Between answers of onnxruntime and of torch, of the sample."""
    step: NotRequired[int | None]
    """Of the training, as it was given."""
    checkpoint: NotRequired[str | None]
    """`uid` of the checkpoint that was exported; None: the model was in memory."""
    parameters: NotRequired[dict[str, str]]
    """Initialisers of the dense part that are parameters or buffers → their names in the model's
    state_dict."""
    state_dict: NotRequired[dict[str, str]]
    """dtype and shape of each tensor in the model's state_dict but for its tables."""
    topk: NotRequired[TopKEntry]
    """Of a two-tower model, if it was exported with its items."""
    towers: NotRequired[TowersEntry]
    """Of a bundle with `topk`; left out by an earlier Hotbed."""
    encoding: NotRequired[str]
    """`CRITEO`: columns become inputs as `hotbed.data.CriteoLog` has it. Left out: as the schema of `model`
    says, if there is one."""
