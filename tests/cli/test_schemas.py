"""`hotbed train` and `predict` on files that a schema describes: text and numbers as they are."""

import csv
import json
import random

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from cli.command_line import run

import hotbed as hb
from hotbed.train.run_record import command_of
from hotbed.train.settings import TrainSettings

SCHEMA = """[columns]
liked = "label"
reader = "id"
book = "id"
genres = { kind = "ids", separator = "|" }
age = { kind = "number", transform = "log" }
"""
GENRES = ["crime", "poetry", "travel"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path, draw = tmp_path_factory.mktemp("ratings"), random.Random(0)
    with open(path / "ratings.csv", "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["liked", "bought", "reader", "book", "genres", "age", "seen", "visit"])
        for row in range(3000):
            reader, book = draw.randrange(40), draw.randrange(60)
            genres = sorted({GENRES[book % 3], draw.choice(GENRES)})
            liked = int(draw.random() < (0.9 if GENRES[reader % 3] in genres else 0.1))
            bought = draw.choice([liked, ""])
            seen = "|".join(f"b{draw.randrange(60)}" for _ in range(draw.randrange(4)))
            line = [liked, bought, f"r-{reader}", f"b{book}", "|".join(genres), 18 + reader, seen]
            out.writerow([*line, f'v"{row},'])
    table = pa.csv.read_csv(path / "ratings.csv")
    pa.parquet.write_table(table, path / "ratings.parquet")
    (path / "schema.toml").write_text(SCHEMA)
    (path / "two.toml").write_text(
        SCHEMA.replace('liked = "label"', 'liked = "label"\nbought = "label"')
    )
    history = 'seen = { kind = "sequence", table = "book", length = 3 }\n'
    (path / "history.toml").write_text(SCHEMA + history)
    return path


def train(folder, tmp_path, *options, data="ratings.csv", schema="schema.toml"):
    figures = tmp_path / "figures.json"
    result = run(
        *("train", "--data", folder / data, "--schema", folder / schema, "--json", figures),
        *("--batch-size", 64, "--lr", 0.01, "--dim", 8, *options),
    )
    assert result.exit_code == 0, result.output
    return json.loads(figures.read_text())


@pytest.mark.parametrize("model", ["dlrm", "deepfm", "dcn", "autoint", "final-mlp"])
def test_train_then_predict(folder, tmp_path, model):
    saved, scores = tmp_path / "model", tmp_path / "scores.csv"
    figures = train(folder, tmp_path, "--model", model, "--epochs", 3, "--save", saved)
    assert figures["rows"] == 3 * 2700 and figures["test_rows"] == 300 and figures["auc"] > 0.75
    result = run(
        "predict", saved, "--data", folder / "ratings.csv", "--out", scores, "--key", "visit"
    )
    assert result.exit_code == 0, result.output
    with open(scores, newline="") as file:
        (heading, *lines) = csv.reader(file)
    assert heading == ["visit", "score"] and [line[0] for line in lines] == [
        f'v"{n},' for n in range(3000)
    ]
    loaded = hb.checkpoint.load_model(saved)
    batches = hb.data.open(folder / "ratings.parquet", loaded.schema)
    logits = torch.cat([z for _, z in hb.train.scored(loaded, batches)])
    wanted = torch.sigmoid(logits.double())
    assert torch.allclose(
        torch.tensor([float(line[1]) for line in lines]).double(), wanted, atol=1e-7
    )


def test_files_of_either_format_train_alike(folder, tmp_path):
    runs = [train(folder, tmp_path, data=f"ratings.{kind}") for kind in ("csv", "parquet")]
    assert runs[0]["auc"] == runs[1]["auc"] and runs[0]["logloss"] == runs[1]["logloss"]


def test_several_labels(folder, tmp_path):
    saved, scores = tmp_path / "model", tmp_path / "scores.csv"
    options = ("--model", "mmoe", "--set", "expert=16,8", "--set", "experts=2", "--epochs", 3)
    train(folder, tmp_path, *options, "--save", saved, schema="two.toml")
    loaded = hb.checkpoint.load_model(saved)
    assert (loaded.settings.tasks, loaded.settings.experts, loaded.settings.expert) == (
        2,
        2,
        (16, 8),
    )
    result = run("predict", saved, "--data", folder / "ratings.parquet", "--out", scores)
    assert result.exit_code == 0, result.output
    heading, *lines = scores.read_text().splitlines()
    assert heading == "row,liked,bought" and lines[-1].startswith("3000,") and len(lines) == 3000
    result = run("train", "--data", folder / "ratings.csv", "--schema", folder / "two.toml")
    assert result.exit_code == 2 and "has one logit" in result.output


def test_histories(folder, tmp_path):
    figures = train(folder, tmp_path, "--model", "din", "--epochs", 2, schema="history.toml")
    assert figures["auc"] > 0.6


def test_two_towers_take_their_own_loss(folder, tmp_path):
    """A softmax over the batch; scores of pairs, as for other models, are those of tests and predictions."""
    saved, scores = tmp_path / "model", tmp_path / "scores.csv"
    sides = ("--set", "user=reader", "--set", "item=book,genres", "--set", "out=8")
    record = tmp_path / "record"
    options = ("--model", "two-tower", *sides, "--epochs", 3, "--save", saved, "--run", record)
    figures = train(folder, tmp_path, *options)
    assert figures["auc"] > 0.6
    with open(record / "history.csv") as file:
        losses = [float(line["loss"]) for line in csv.DictReader(file)]
    assert losses[0] > 1, "a softmax over 64 items, not the loss of clicks"
    result = run("predict", saved, "--data", folder / "ratings.csv", "--out", scores)
    assert result.exit_code == 0, result.output


def test_a_run_that_goes_on_is_one_that_never_stopped(folder, tmp_path):
    options = ("--shuffle", 256, "--every", 10)
    whole = train(folder, tmp_path, *options, "--epochs", 2, "--checkpoint", tmp_path / "a")
    train(folder, tmp_path, *options, "--epochs", 1, "--checkpoint", tmp_path / "b")
    again = train(
        folder, tmp_path, *options, "--epochs", 2, "--checkpoint", tmp_path / "b", "--resume"
    )
    assert again["logloss"] == whole["logloss"] and again["resumed_at"] == 43
    refused = run(
        *("train", "--data", folder / "ratings.csv", "--schema", folder / "schema.toml"),
        *("--batch-size", 64, "--lr", 0.01, "--dim", 8, "--shuffle", 256, "--set", "top=8"),
        *("--checkpoint", tmp_path / "b", "--resume"),
    )
    assert refused.exit_code == 2 and "has --set nothing, and now it is top=8" in refused.output


def test_validation_and_a_record(folder, tmp_path):
    record = tmp_path / "record"
    train(
        folder,
        tmp_path,
        *("--validation-fraction", 0.1, "--run", record, "--model", "mmoe"),
        schema="two.toml",
    )
    told = json.loads((record / "run.json").read_text())
    assert told["figures"]["validation"]["count"] == 1
    page = tmp_path / "page.html"
    assert run("report", record, "--out", page).exit_code == 0
    assert "bought" in page.read_text()


def test_a_run_of_an_earlier_version_goes_on(folder, tmp_path, monkeypatch):
    """Its checkpoints know nothing of schemas, settings of models and validation."""
    log, run_in = tmp_path / "log.tsv", tmp_path / "run"
    hb.data.write_criteo_tsv(log, rows=600, seed=0)
    options = ("--data", log, "--dim", 4, "--batch-size", 64, "--checkpoint", run_in)
    now = TrainSettings.of_same_run
    later = ("schema", "set_", "validation_fraction")
    with monkeypatch.context() as before:
        before.setattr(
            TrainSettings,
            "of_same_run",
            lambda self: {name: value for name, value in now(self).items() if name not in later},
        )
        assert run("train", *options).exit_code == 0
    assert run("train", *options, "--epochs", 2, "--resume").exit_code == 0
    refused = run("train", *options, "--epochs", 2, "--set", "top=8", "--resume")
    assert refused.exit_code == 2 and "has --set nothing, and now it is top=8" in refused.output


def test_the_command_of_a_record_can_be_typed_again(folder):
    settings = TrainSettings(
        data=("a b.csv", "c.csv"), schema="s.toml", set_=("top=8", "bottom=4,16")
    )
    line = command_of(settings)
    assert line == (
        "hotbed train --data 'a b.csv' --data c.csv --schema s.toml --set top=8 --set bottom=4,16"
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--set", "layers=3"), "write NAME=VALUE, the name one of dim, num_dense"),
        (("--set", "top"), "write NAME=VALUE"),
        (("--set", "top=a,b"), "top is ['a', 'b']. Pass a list of integers"),
        (("--on-error", "skip"), "--on-error skip is of click logs"),
        (("--model", "two-tower"), "each feature must be of one"),
        (("--schema", "none.toml"), "none.toml"),
    ],
)
def test_what_it_refuses(folder, options, told):
    result = run(
        "train", "--data", folder / "ratings.csv", "--schema", folder / "schema.toml", *options
    )
    assert result.exit_code == 2 and told in " ".join(result.output.split()), result.output


def test_a_key_that_is_a_feature_is_refused(folder, tmp_path):
    saved = tmp_path / "model"
    train(folder, tmp_path, "--save", saved)
    out = tmp_path / "scores.csv"
    result = run("predict", saved, "--data", folder / "ratings.csv", "--out", out, "--key", "book")
    assert result.exit_code == 2 and "--key book is a column of the kind 'id'" in result.output
