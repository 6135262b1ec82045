"""`init.Columns`: several vectors of an id in one row."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kept_in import PLACES, storage_of

import hotbed as hb
from hotbed.init import Columns, Constant, Normal, TruncatedNormal, Uniform, XavierNormal, Zeros
from hotbed.tables import columns_of

KINDS = [Normal(std=1.0), Uniform(-1.0, 1.0), Zeros(), Constant(3.0), TruncatedNormal(0.0, 1.0)]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def rows_of(table, ids):
    collection = hb.EmbeddingCollection([table], seed=7)
    return collection.lookup(table.name, torch.as_tensor(ids))


@given(
    parts=st.lists(st.tuples(st.integers(1, 20), st.sampled_from(KINDS)), min_size=1, max_size=4),
    rows=st.sampled_from([None, 50]),
    dtype=st.sampled_from(DTYPES),
    padding=st.sampled_from([None, 3]),
)
def test_a_column_starts_as_in_a_table_of_its_initializer_alone(parts, rows, dtype, padding):
    dim, ids = sum(width for width, _ in parts), [0, 3, 17, 49]
    options = {"rows": rows, "dtype": dtype, "padding_idx": padding}
    found = rows_of(hb.Table("a", dim, init=Columns(parts), **options), ids)
    begin = 0
    for width, each in parts:
        alone = rows_of(hb.Table("a", dim, init=each, **options), ids)
        assert torch.equal(found[:, begin : begin + width], alone[:, begin : begin + width])
        begin += width


def test_a_part_of_the_columns_starts_as_in_the_whole():
    table = hb.Table("a", 9, init=Columns([(4, Normal(std=1.0)), (1, Zeros()), (4, Uniform(1, 2))]))
    whole = rows_of(table, range(20))
    for begin, end in itertools.combinations(range(10), 2):
        part = rows_of(columns_of(table, begin, end), range(20))
        assert torch.equal(part, whole[:, begin:end]), (begin, end)


def test_many_rows_are_drawn_by_several_threads_as_by_one():
    table = hb.Table("a", 3, init=Columns([(2, Normal(std=1.0)), (1, Constant(5.0))]))
    many = rows_of(table, range(50_000))
    assert torch.equal(many[31_111], rows_of(table, [31_111])[0])
    assert (many[:, 2] == 5).all() and 0.98 < float(many[:, :2].std()) < 1.02


def test_xavier_sees_the_columns_of_its_part():
    table = hb.Table("a", 5, rows=7, init=Columns([(4, XavierNormal()), (1, Zeros())]))
    alone = hb.Table("a", 4, rows=7, init=XavierNormal())
    assert torch.equal(rows_of(table, range(7))[:, :4], rows_of(alone, range(7)))


@pytest.mark.parametrize("place", PLACES)
def test_models_with_weights_in_the_rows_train_as_with_tables_of_their_own(place, tmp_path):
    """Adam works column by column, so it is the same arithmetic, but for the sum of a batch's weights."""
    torch.manual_seed(0)
    tables = [hb.Table("a", 4), hb.Table("b", 4, rows=40, combiner="mean")]
    models = [
        hb.models.DeepFM(
            tables, 4, 2, [8], seed=1, one_row=one, storage=storage_of(place, tmp_path / str(one))
        )
        for one in (False, True)
    ]
    models[1].load_state_dict(
        {n: v for n, v in models[0].state_dict().items() if not n.startswith("embeddings")},
        strict=False,
    )
    optimizers = [hb.optim.Adam(model.parameters(), lr=0.05) for model in models]
    draw = torch.Generator().manual_seed(3)
    for _ in range(5):
        batch = {
            "a": torch.randint(-99, 99, (16,), generator=draw),
            "b": torch.randint(0, 40, (16, 3), generator=draw),
            "dense": torch.randn(16, 2, generator=draw),
        }
        labels = (torch.rand(16, generator=draw) > 0.5).float()
        logits = [model(batch) for model in models]
        torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-5)
        for z, optimizer in zip(logits, optimizers, strict=True):
            torch.nn.functional.binary_cross_entropy_with_logits(z, labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [*models[1].embeddings.tables] == ["a", "b"]
    row = models[1].embeddings.lookup("b", torch.tensor([5]))
    assert row.shape == (1, 5)
    wide = models[0].embeddings.lookup("b.wide", torch.tensor([5]))
    torch.testing.assert_close(row[:, 4:], wide, rtol=1e-4, atol=1e-5)


def test_checkpoints_keep_them(tmp_path):
    model = hb.models.WideDeep(["a"], 4, 1, one_row=True, seed=2)
    batch = {"a": torch.tensor([5, 6]), "dense": torch.ones(2, 1)}
    model(batch)
    hb.save(tmp_path, model, step=0)
    again = hb.checkpoint.load_model(tmp_path)
    assert again.settings.one_row and again.embeddings.tables == model.embeddings.tables
    new = torch.tensor([77])
    assert torch.equal(again.embeddings.lookup("a", new), model.embeddings.lookup("a", new))
    table = hb.Table("t", 3, init=Columns([(2, Normal()), (1, Zeros())]))
    other = hb.Table("t", 3, init=Columns([(1, Normal()), (2, Zeros())]))
    hb.save(tmp_path / "t", hb.EmbeddingCollection([table]), step=0)
    hb.load(tmp_path / "t", hb.EmbeddingCollection([table]))
    with pytest.raises(hb.checkpoint.CheckpointError, match="was saved with init"):
        hb.load(tmp_path / "t", hb.EmbeddingCollection([other]))


@pytest.mark.parametrize("kind", [hb.optim.RowwiseAdagrad, hb.optim.RowwiseAdam])
def test_rules_with_one_state_a_row_are_refused(kind):
    table = hb.Table("a", 3, init=Columns([(2, Normal()), (1, Zeros())]))
    collection = hb.EmbeddingCollection([table])
    with pytest.raises(
        hb.OptimizerError, match=r"table 'a'\): its rule has one state for a whole row"
    ):
        kind(collection.parameters(), lr=0.1)
    hb.optim.Adagrad(collection.parameters(), lr=0.1)


def test_what_it_refuses():
    with pytest.raises(
        hb.TableError, match="Table 'a': its init.Columns has 3 columns, and the table 4"
    ):
        hb.Table("a", 4, init=Columns([(2, Normal()), (1, Zeros())]))
    with pytest.raises(hb.TableError, match="parts is empty"):
        Columns([])
    for width in (0, -1, 1.5, True):
        with pytest.raises(hb.TableError, match="a part has"):
            Columns([(width, Zeros())])
    for parts in (None, 3, "ab", [4, Normal()], (4, Normal()), {4: Normal()}, [(1, Zeros(), 2)]):
        with pytest.raises(hb.TableError, match=r"Pass \(number of columns, initializer\) pairs"):
            Columns(parts)
    for each in (Columns([(1, Zeros())]), None, 3):
        with pytest.raises(hb.TableError, match="the initializer of 1 columns is"):
            Columns([(1, each)])
    with pytest.raises(
        hb.TableError, match="Table 'a': XavierNormal scales with the number of rows"
    ):
        hb.Table("a", 2, init=Columns([(1, XavierNormal()), (1, Zeros())]))


def test_widths_of_numpy_are_kept_in_checkpoints(tmp_path):
    table = hb.Table("t", 3, init=Columns([(np.int64(2), Normal()), (1, Zeros())]))
    hb.save(tmp_path, hb.EmbeddingCollection([table]), step=0)
    hb.load(tmp_path, hb.EmbeddingCollection([table]))


@dataclasses.dataclass(frozen=True)
class Ones:
    """One of a user's own, with a name of hotbed.init."""

    value: float = 2.0

    def resolve(self, rows, dim):
        return Constant(self.value).resolve(rows, dim)


def test_an_initializer_with_a_name_of_ours_is_the_users(tmp_path):
    model = hb.models.DCN([hb.Table("a", 4, init=Ones())], 4, 1, [3])
    hb.save(tmp_path, model, step=0)
    with pytest.raises(hb.checkpoint.CheckpointError, match="is none of hotbed.init"):
        hb.checkpoint.load_model(tmp_path)


def test_parts_of_the_columns_that_a_user_cuts():
    cut = hb.dist.ColumnWise((0, 1), (1, 3))
    model = hb.models.WideDeep([hb.Table("a", 4, sharding=cut)], 4, 1)
    assert model.embeddings.tables["a"].sharding == cut
    assert model.embeddings.tables["a.wide"].sharding is None
    model = hb.models.WideDeep([hb.Table("a", 4, sharding=cut)], 4, 1, one_row=True)
    assert model.embeddings.tables["a"].sharding == hb.dist.ColumnWise((0, 1), (1, 4))
    hb.plan(model, 2)
