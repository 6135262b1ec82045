"""Values between ranks: what comes back, and bytes that are no message."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dist.worlds import run
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import hotbed as hb
from hotbed.dist import json_values
from hotbed.dist.json_values import MOST_DEPTH, MessageError, decode, encode
from hotbed.dist.ranks import Ranks

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint16, torch.uint64),
]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    count = math.prod(shape) * dtype.itemsize
    raw = bytearray(draw(st.binary(min_size=count, max_size=count)))
    if dtype is torch.bool:
        raw = bytearray(byte & 1 for byte in raw)
    flat: Any = (
        torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    )
    made = flat.view(dtype).view(shape)
    return made.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else made


PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(), st.binary()
)
VALUES = st.recursive(
    PLAIN | tensors(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(), inner, max_size=4),
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        kinds = one.dtype == other.dtype and one.shape == other.shape
        return kinds and raw(one) == raw(other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(same, one.values(), other.values()))
    return bool(one == other) or (one != one and other != other)


def raw(tensor: Tensor) -> bytes:
    flat: Any = tensor.contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist())


def message_of(value: Any) -> Tensor:
    return torch.cat(encode(value))


def with_json(words: Any, behind: bytes = b"") -> Tensor:
    text = words if isinstance(words, bytes) else json.dumps(words).encode()
    whole = len(text).to_bytes(8, "little") + text
    return torch.tensor(list(whole + b"\0" * (-len(whole) % 8) + behind), dtype=torch.uint8)


@given(VALUES)
@example("\ud800")
@example({"dict": {"tuple": [1]}, "tensor": ["float32", [2]]})
@settings(max_examples=300, deadline=None)
def test_values_come_back(value: Any) -> None:
    assert same(decode(message_of(value)), value)


@given(VALUES, st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_messages_are_refused_or_read_as_values(value: Any, data: st.DataObject) -> None:
    message = bytearray(message_of(value).numpy().tobytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(message) - 1))
        message[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(message)))
    for some in (message, message[:cut], message + b"\0" * 8):
        read(bytes(some))


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_refused_or_read_as_values(some: bytes) -> None:
    read(some)
    read(bytes(with_json(some).tolist()))


def read(some: bytes) -> None:
    message = torch.frombuffer(bytearray(some or b"\0"), dtype=torch.uint8)[: len(some)]
    try:
        value = decode(message)
    except MessageError:
        return
    assert same(decode(message_of(value)), value)  # it is one that a rank could have sent


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


HOSTILE = {
    "no length": torch.zeros(7, dtype=torch.uint8),
    "too long": torch.full((16,), 255, dtype=torch.uint8),
    "nested": with_json(b"[" * 100_000),
    "deep": with_json(deep(MOST_DEPTH + 1)),
    "many digits": with_json(b"1" * 10_000),
    "no UTF-8": with_json(b'"\xff"'),
    "unknown kind": with_json({"code": "os.system"}),
    "two kinds": with_json({"tuple": [], "dict": {}}),
    "no tensor": with_json({"tensor": ["float32", [2]]}),
    "left over": with_json(None, b"\0" * 8),
    "object dtype": with_json({"tensor": ["object", [0]]}),
    "quantized": with_json({"tensor": ["qint8", [0]]}),
    "negative side": with_json({"tensor": ["uint8", [-8]]}, b"\0" * 8),
    "product 2^64": with_json({"tensor": ["uint8", [2**32, 2**32]]}, b"\0" * 8),
    "sides beside 0": with_json({"tensor": ["uint8", [0, 2**40, 2**40]]}),
    "fractional side": with_json({"tensor": ["uint8", [8.0]]}, b"\0" * 8),
    "boolean side": with_json({"tensor": ["uint8", [True]]}, b"\0" * 8),
    "many sides": with_json({"tensor": ["uint8", [1] * 1000]}, b"\0" * 8),
    "no hexadecimal": with_json({"bytes": "zz"}),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_messages_are_refused(what: str) -> None:
    with pytest.raises(MessageError):
        decode(HOSTILE[what])


def test_numbers_and_text_of_numpy_come_as_pythons() -> None:
    found = decode(message_of({np.str_("a"): [np.float64(0.1), np.str_("b")]}))
    assert found == {"a": [0.1, "b"]}
    assert [type(one) for one in (*found, *found["a"])] == [str, float, str]


def test_what_is_deep_or_of_another_type_is_not_sent() -> None:
    assert decode(message_of(deep(MOST_DEPTH))) == deep(MOST_DEPTH)
    with pytest.raises(MessageError, match="32 deep"):
        encode(deep(MOST_DEPTH + 1))
    for value in ({1, 2}, {1: 2}, object(), torch.eye(2).to_sparse(), lambda: None):
        with pytest.raises(MessageError, match="got (set|dict|object|Tensor|function)"):
            encode(value)


class Runs:
    """Touches a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def pickled(rank: int, world: int, folder: str, shared: bool) -> None:
    touched = Path(folder) / "touched"
    ranks = Ranks(shared_memory=shared)
    told = ranks.values_of_all("figures", {"rank": rank, "logits": torch.full((rank,), 0.5)})
    assert [one["rank"] for one in told] == [*range(world)]
    assert [one["logits"].tolist() for one in told] == [[0.5] * r for r in range(world)]
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            hostile = torch.tensor(list(pickle.dumps(Runs(touched))), dtype=torch.uint8)
            patch.setattr(json_values, "encode", lambda value: [hostile])
        with pytest.raises(hb.dist.PeerError, match="Rank 1 sent no readable message for figures"):
            ranks.values_of_all("figures", 1)
    assert not touched.exists()


@pytest.mark.process
@pytest.mark.parametrize("shared", [False, True])
def test_what_a_rank_sends_runs_no_code(tmp_path: Path, shared: bool) -> None:
    run(2, pickled, str(tmp_path), shared)


def announces(rank: int, world: int, size: int) -> None:
    ranks = Ranks(timeout=20)
    pieces = [torch.empty(0, dtype=torch.uint8)]
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(json_values, "encode", lambda value: pieces)
            patch.setattr(json_values, "sum", lambda lengths: size, raising=False)
        with pytest.raises(hb.dist.PeerError, match="Rank 1 announces"):
            ranks.values_of_all("figures", 1)


@pytest.mark.process
@pytest.mark.parametrize("size", [-1, 1 << 60])
def test_sizes_that_no_memory_has_are_refused_before_it_is_taken(size: int) -> None:
    run(2, announces, size)


def not_sent(rank: int, world: int) -> None:
    ranks = Ranks(timeout=20)
    error = MessageError if rank else hb.dist.PeerError
    with pytest.raises(error, match="got set"):
        ranks.values_of_all("figures", {1} if rank else 1)
    assert ranks.values_of_all("figures", rank) == [*range(world)]


@pytest.mark.process
def test_a_value_that_cannot_be_sent_is_told_to_all() -> None:
    run(2, not_sent)


def test_nothing_unpickles() -> None:
    sources = (Path(hb.__file__).parent).rglob("*.py")
    words = ("import pickle", "from pickle", "object_list", "all_gather_object", "gather_object(")
    found = [
        (path.name, word)
        for path in sources
        for word in (*words, "allow_pickle=True", "weights_only=False", "marshal")
        if word in path.read_text(encoding="utf-8")
    ]
    assert found == []


def no_unicode(rank: int, world: int) -> None:
    ranks = Ranks(timeout=20)
    with pytest.raises(OSError if rank else hb.dist.PeerError, match="no space in /tmp/"):
        with ranks.reporting("figures"):
            if rank:
                raise OSError("no space in /tmp/\udcff")  # as Python has names that are no UTF-8
            ranks.handshake("figures")
    assert ranks.values_of_all("figures", rank) == [*range(world)]


@pytest.mark.process
def test_an_error_that_names_a_file_of_any_name_is_told_to_all() -> None:
    run(2, no_unicode)
