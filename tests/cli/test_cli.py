import csv
import io
import json
import math
import os
import re
import signal
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cli.command_line import run, train

import hotbed as hb
from hotbed.checkpoint import begun
from hotbed.data import CriteoLog
from hotbed.models import MODELS
from hotbed.train import auc, report
from hotbed.train.progress import ProgressBar
from hotbed.train.settings import OPTIMIZERS

OF_A_SCHEMA = {"din", "mmoe", "two-tower"}
"""Models that click logs have not enough columns for."""


@pytest.mark.parametrize("model", [model for model in MODELS if model not in OF_A_SCHEMA])
def test_train_then_predict(log, tmp_path, model):
    saved = tmp_path / "model"
    result, figures = train(log, tmp_path, "--model", model, "--epochs", 3, "--save", saved)
    assert result.exit_code == 0, result.output
    assert figures["rows"] == 3 * 3_600 and figures["test_rows"] == 400
    assert figures["epochs"] == 3 and figures["steps"] == 3 * 57
    assert 0.65 < figures["auc"] < 0.9
    assert (
        0.3 < figures["logloss"] < (0.75 if model.startswith("dcn") else 0.65)
    )  # it learns the log by heart
    assert figures["samples_per_second"] == pytest.approx(figures["rows"] / figures["seconds"])
    assert figures["peak_rss_bytes"] > 50 * 2**20 and figures["interrupted"] is False
    assert figures["config"]["model"] == model and figures["config"]["lr"] == 0.01
    assert figures["versions"]["torch"] == torch.__version__
    distinct = {
        (name, int(i))
        for batch in CriteoLog(log, rows=(0, 3_600))
        for name in hb.data.CATEGORIES
        for i in batch[name]
    }
    tables = 2 if model in ("wide-deep", "deepfm", "xdeepfm") else 1
    assert figures["stored_rows"] == tables * len(distinct)
    assert f"{figures['auc']:.4f}" in result.stdout and "samples a second" in result.stdout
    assert "AUC" in result.stderr and "samples/s" in result.stderr

    scores = tmp_path / "scores.csv"
    test_part = tmp_path / "test.tsv"
    test_part.write_text("".join(log.read_text().splitlines(True)[3_600:]))
    result = run("predict", saved, "--data", test_part, "--out", scores)
    assert result.exit_code == 0, result.output
    assert "400 samples scored" in result.stdout and f"AUC {figures['auc']:.4f}" in result.stdout
    with open(scores, newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["line", "score"] and [row[0] for row in rows] == [
        str(n + 1) for n in range(400)
    ]
    score = torch.tensor([float(row[1]) for row in rows], dtype=torch.float64)
    assert ((score > 0) & (score < 1)).all()
    labels = torch.cat([batch["label"] for batch in CriteoLog(test_part)])
    assert auc(score, labels) == pytest.approx(figures["auc"], abs=1e-6)

    bare = tmp_path / "bare.tsv"
    lines = test_part.read_text().splitlines(True)
    bare.write_text("".join(line.partition("\t")[2] for line in lines))
    result = run("predict", saved, "--data", bare, "--out", tmp_path / "again.csv")
    assert result.exit_code == 0 and "AUC" not in result.stdout
    assert (tmp_path / "again.csv").read_text() == scores.read_text()


def test_scores_have_keys(log, tmp_path):
    saved = tmp_path / "model"
    assert train(log, tmp_path, "--save", saved)[0].exit_code == 0
    lines = log.read_text().splitlines(True)[:60]
    one, two = tmp_path / "one.tsv", tmp_path / "two.tsv"
    fields = lines[7].split("\t")
    lines[7] = "\t".join([*fields[:18], "", *fields[19:]])  # C5 is missing
    one.write_text("".join([*lines[:10], "\n", "\r\n", *lines[10:20]]))
    two.write_text("\n" + "".join(lines[20:]).rstrip("\n"))
    options = ("predict", saved, "--data", one, two, "--batch-size", 7, "--out")
    assert run(*options, tmp_path / "lines.csv").exit_code == 0
    result = run(*options, tmp_path / "keys.csv", "--key", "C5")
    assert result.exit_code == 0, result.output
    with open(tmp_path / "lines.csv", newline="") as file:
        header, *by_line = csv.reader(file)
    assert header == ["line", "score"]
    texts = (one.read_text() + two.read_text()).split("\n")
    expected = [number for number, text in enumerate(texts, 1) if text.strip()]
    assert [int(number) for number, _ in by_line] == expected and len(expected) == 60
    with open(tmp_path / "keys.csv", newline="") as file:
        header, *by_key = csv.reader(file)
    assert header == ["C5", "score"]
    assert [key for key, _ in by_key] == [line.split("\t")[18] for line in lines]
    assert by_key[7][0] == "" and [s for _, s in by_key] == [s for _, s in by_line]
    for wrong in ("I1", "C27", "label"):
        result = run(*options, tmp_path / "no.csv", "--key", wrong)
        assert (
            result.exit_code == 2
            and f"--key is {wrong}; it must be one of C1 to C26" in result.output
        )


def test_a_seed_repeats_a_run(log, tmp_path):
    runs = [train(log, tmp_path, "--seed", seed, "--shuffle", 1_000)[1] for seed in (4, 4, 5)]
    assert runs[0]["logloss"] == runs[1]["logloss"] != runs[2]["logloss"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer(log, tmp_path, optimizer):
    result, figures = train(log, tmp_path, "--optimizer", optimizer)
    assert result.exit_code == 0, result.output
    assert re.search(rf"\b{optimizer}\b", " ".join(run("train", "--help").stdout.split()))
    assert figures["logloss"] < 0.75


def test_several_logs(log, tmp_path):
    lines = log.read_text().splitlines(True)
    (tmp_path / "a.tsv").write_text("".join(lines[:1_500]))
    (tmp_path / "b.tsv").write_text("".join(lines[1_500:]))
    whole = train(log, tmp_path)[1]
    spread = train(tmp_path / "a.tsv", tmp_path)[1]
    assert spread["rows"] == 1_350
    figures = tmp_path / "figures.json"
    for data in (
        ("--data", tmp_path / "a.tsv", tmp_path / "b.tsv"),
        ("--data", tmp_path / "a.tsv", "--data", tmp_path / "b.tsv"),
    ):
        result = run(
            "train", *data, "--dim", 4, "--batch-size", 64, "--lr", 0.01, "--json", figures
        )
        assert result.exit_code == 0, result.output
        assert json.loads(figures.read_text())["logloss"] == whole["logloss"]


def test_no_test_rows(log, tmp_path):
    result, figures = train(log, tmp_path, "--test-fraction", 0)
    assert result.exit_code == 0 and "test AUC" not in result.stdout
    assert figures["rows"] == 4_000 and figures["auc"] is None and figures["test_rows"] == 0


@pytest.mark.parametrize(
    ("samples", "said"), [(1, "--test-fraction 0.1 of 1 sample is none."), (12, None)]
)
def test_a_log_too_short_to_test_on_is_told(log, tmp_path, samples, said):
    short = tmp_path / "short.tsv"
    short.write_text("".join(log.read_text().splitlines(True)[:samples]))
    result, figures = train(short, tmp_path)
    assert result.exit_code == 0, result.output
    notice = f"Notice: nothing will be tested: {said} Raise it, or give more samples."
    assert (notice in result.stderr) == (said is not None) == (figures["test_rows"] == 0)
    lines = [line.split("│")[1:3] for line in result.stdout.splitlines() if "│" in line]
    shown = {name.strip(): value.strip() for name, value in lines}
    assert shown["samples trained on"] == str(figures["rows"])
    assert shown["samples tested on"] == ("1 (the last by time)" if said is None else "none")
    assert shown.get("test AUC") == ("none: all labels are alike" if said is None else None)
    assert shown["rows stored"] == str(figures["stored_rows"]) and "nan" not in result.output


def test_skipped_lines_are_reported(log, tmp_path):
    lines = log.read_text().splitlines(True)
    lines[10] = lines[3_999] = "broken\n"
    broken = tmp_path / "broken.tsv"
    broken.write_text("".join(lines))
    result, figures = train(broken, tmp_path)
    assert result.exit_code == 2 and figures is None
    assert f"Error: {broken}, line 11: 1 columns, expected 40" in result.stderr
    result, figures = train(broken, tmp_path, "--on-error", "skip")
    assert result.exit_code == 0 and "malformed lines skipped" in result.stdout
    assert figures["skipped_lines"] == 2 and figures["rows"] == 3_599


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere.tsv"], "Click log 'nowhere.tsv' does not exist."),
        (["--data", "{tmp}"], "is a directory; pass the files in it."),
        ([], "Name at least one file of samples: --data PATH."),
        (
            ["--data", "{log}", "--model", "gpt"],
            "--model is gpt; it must be one of autoint, dcn, dcn-v1,",
        ),
        (["--data", "{log}", "--optimizer", "lion"], "--optimizer is lion; it must be one of sgd"),
        (["--data", "{log}", "--dim", "0"], "--dim is 0; it must be positive."),
        (["--data", "{log}", "--local-world-size", "0"], "--local-world-size is 0; it must be"),
        (["--data", "{log}", "--prefetch", "2"], "--prefetch is 2; it must be 0 or 1"),
        (
            ["--data", "{log}", "--local-world-size", "2"],
            "a divisor of the number of processes, 1.",
        ),
        (["--data", "{log}", "--host", str(10**30)], f"--host is {10**30}; it must be a size such"),
        (
            ["--data", "{log}", "--device", "9" * 2000, "--host", "1GB"],
            "it must be a size such as 8GB or 512MiB, or a number of bytes, up to 2**60.",
        ),
        (["--data", "{log}", "--on", "tpu"], "--on is tpu; it must be cpu, cuda or cuda:N."),
        (["--data", "{log}", "--lr", "-1"], "--lr is -1.0; it must be positive, and"),
        (["--data", "{log}", "--lr", "nan"], "--lr is nan; it must be positive, and"),
        (
            ["--data", "{log}", "--test-fraction", "1"],
            "--test-fraction is 1.0; it must be in [0, 1).",
        ),
        (
            ["--data", "{log}", "--on-error", "hide"],
            "--on-error is hide; it must be raise or skip.",
        ),
        (["--data", "{log}", "--lr", "1e300"], "--lr is 1e+300; it must be positive, and at most"),
        (["--data", "{pipe}"], "is a pipe or a device, which can be read once"),
        (["--data", "{log}", "/dev/null"], "--data /dev/null is a pipe or a device, which can"),
        (["--data", "{log}", "--json", ""], "Cannot write '': the path is empty. Name a file."),
        (["--data", "{log}", "--trace", ""], "Cannot write '': the path is empty. Name a file."),
        (["--data", "{empty}"], "There are no samples to train on in"),
        (["--data", "{bare}"], "39 columns, expected 40"),
        (["--data", "{log}", "--json", "{tmp}/no/x.json"], "no' does not exist."),
        (["--data", "{log}", "--json", "{tmp}"], "it is a folder."),
        (
            ["--data", "{log}", "--save", "{log}"],
            "and --save {log} are the same file. Name another.",
        ),
        (["--data", "{log}", "--save", "{empty}"], "it is a file."),
        (["--data", "{log}", "--save", "{log}/x"], "Not a directory."),
        (["--data", "{log}", "--save", "{tmp}"], "the folder holds other files."),
    ],
)
def test_mistakes_are_told_in_one_sentence(log, tmp_path, arguments, message):
    (tmp_path / "empty.tsv").write_text("\n")
    (tmp_path / "bare.tsv").write_text(
        "".join(line.partition("\t")[2] for line in log.read_text().splitlines(True)[:9])
    )
    names = {
        "log": log,
        "tmp": tmp_path,
        "empty": tmp_path / "empty.tsv",
        "bare": tmp_path / "bare.tsv",
        "pipe": tmp_path / "pipe",
    }
    os.mkfifo(names["pipe"])
    result = run("train", *(argument.format(**names) for argument in arguments))
    assert result.exit_code == 2, result.output
    assert message.format(**names) in result.stderr
    assert "Traceback" not in result.output and result.stderr.count("Error") == 1


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (False, "sees no CUDA device. Install a CUDA build of torch, or leave --on out."),
        (True, "--on cuda needs --device and --host: the tables grow with the ids of the log"),
    ],
)
def test_training_on_a_gpu_needs_one_and_a_budget(log, monkeypatch, there, message):
    monkeypatch.setattr("torch.cuda.is_available", lambda: there)
    result = run("train", "--data", log, "--on", "cuda")
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())


def test_a_diverging_run_is_told(log, tmp_path):
    saved = tmp_path / "m"
    options = ("--optimizer", "sgd", "--lr", 1e30, "--save", saved)
    result, figures = train(log, tmp_path, *options)
    assert result.exit_code == 2 and figures is None and not saved.exists()
    last = result.stderr.splitlines()[-1]
    assert last.startswith("Error: ") and ("the loss is" in last or "gradient" in last)


def test_predict_mistakes(log, tmp_path):
    out = tmp_path / "scores.csv"
    result = run("predict", tmp_path / "none", "--data", log, "--out", out)
    assert result.exit_code == 2 and "There is no folder" in result.stderr
    result = run("predict", tmp_path, "--data", log, "--out", out)
    assert result.exit_code == 2 and "There is no checkpoint" in result.stderr
    result = run("predict", tmp_path, "--data", log, "--out", tmp_path / "no" / "scores.csv")
    assert result.exit_code == 2 and "does not exist" in result.stderr
    result = run("predict", tmp_path, "--data", log, "--out", "")
    assert result.exit_code == 2 and "the path is empty. Name a file." in result.stderr
    result = run("predict", tmp_path, "--data", log, "--out", out, "--batch-size", 2**62)
    assert result.exit_code == 2 and "--batch-size" in result.stderr
    train(log, tmp_path, "--save", tmp_path / "m")
    (tmp_path / "broken.tsv").write_text(log.read_text() + "broken\n")
    result = run("predict", tmp_path / "m", "--data", tmp_path / "broken.tsv", "--out", out)
    assert result.exit_code == 2 and "line 4001: 1 columns" in result.stderr
    assert not out.exists() and not (tmp_path / "scores.csv.part").exists()


def interrupt_at(monkeypatch, number, times=1):
    """Ctrl-C while step `number` is reported."""
    plain = ProgressBar.on_step

    def on_step(self, step):
        plain(self, step)
        if step.number == number:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ProgressBar, "on_step", on_step)


def test_an_interrupt_ends_cleanly_with_what_was_reached(log, tmp_path, monkeypatch):
    interrupt_at(monkeypatch, 5)
    saved = tmp_path / "m"
    result, figures = train(log, tmp_path, "--save", saved, "--epochs", 9)
    assert result.exit_code == 130, result.output
    assert figures["interrupted"] is True
    assert (figures["steps"], figures["rows"], figures["epochs"]) == (5, 320, 0)
    assert figures["test_rows"] == 400 and 0 < figures["auc"] < 1
    assert "Interrupted" in result.stdout
    result = run("predict", saved, "--data", log, "--out", tmp_path / "scores.csv")
    assert result.exit_code == 0


def test_a_second_interrupt_leaves_out_the_test(log, tmp_path, monkeypatch):
    interrupt_at(monkeypatch, 5, times=2)
    result, figures = train(log, tmp_path)
    assert result.exit_code == 130
    assert figures["interrupted"] is True and figures["auc"] is None
    assert figures["rows"] in (256, 320) and figures["test_rows"] == 0


def test_an_interrupt_before_training(log, tmp_path, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt  # where Python raises it after a signal differs by version

    monkeypatch.setattr(CriteoLog, "count_rows", interrupted)
    result, figures = train(log, tmp_path)
    assert result.exit_code == 130 and figures is None and "Traceback" not in result.output


def test_a_device_is_written_to_and_not_replaced(log, tmp_path):
    """A pipe stands for /dev/stdout and its like."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as reader:
        text = reader.submit(pipe.read_text)
        result = run("train", "--data", log, "--dim", 2, "--json", pipe)
        assert result.exit_code == 0, result.output
        assert math.isfinite(json.loads(text.result())["auc"])
    assert stat.S_ISFIFO(pipe.stat().st_mode) and os.listdir(tmp_path) == ["pipe"]


def test_a_linked_file_is_written_behind_its_link(log, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "figures")
    assert run("train", "--data", log, "--dim", 2, "--json", tmp_path / "link").exit_code == 0
    assert (tmp_path / "link").is_symlink() and math.isfinite(
        json.loads((tmp_path / "figures").read_text())["auc"]
    )


def test_a_full_disk_is_told_in_one_sentence_and_the_figures_are_kept(log, tmp_path, monkeypatch):
    def full(path, tensors):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(begun, "write_tensors", full)
    result, figures = train(log, tmp_path, "--save", tmp_path / "m")
    assert result.exit_code == 2 and 0 < figures["auc"] < 1 and "test AUC" in result.stdout
    assert f"Error: {tmp_path / 'm'}: No space left on device: a checkpoint takes" in result.stderr
    assert "saved to" not in result.stdout and not (tmp_path / "m").exists()


def test_scores_that_do_not_fit_are_an_error(log, tmp_path, monkeypatch):
    assert train(log, tmp_path, "--save", tmp_path / "m")[0].exit_code == 0

    class Full(io.StringIO):
        def close(self):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "open", lambda *a, **k: Full(), raising=False)
    out = tmp_path / "scores.csv"
    result = run("predict", tmp_path / "m", "--data", log, "--out", out)
    assert result.exit_code == 2 and not out.exists()
    assert f"Error: Cannot write '{out}': No space left on device." in result.stderr


def test_help_and_version():
    result = run("--help")
    assert result.exit_code == 0
    for word in ("train", "predict", "Examples", "hotbed train --data", "130"):
        assert word in result.stdout
    for command in ("train", "predict"):
        result = run(command, "--help")
        assert result.exit_code == 0 and "--data" in result.stdout
    assert "--test-fraction" in run("train", "--help").stdout
    assert run().exit_code != 0 and "Usage" in run().output
    result = run("--version")
    assert result.exit_code == 0 and result.stdout == (
        f"hotbed {hb.__version__} (torch {torch.__version__})\n"
    )
    assert run("train", "--bogus").exit_code == 2


@pytest.mark.process
def test_the_installed_entry_point(log, tmp_path):
    code = "import hotbed_command; hotbed_command.main()"
    figures = tmp_path / "figures.json"
    options = ["--data", str(log), "--dim", "2", "--json", str(figures)]
    done = subprocess.run(
        [sys.executable, "-c", code, "train", *options], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "test AUC" in done.stdout and math.isfinite(json.loads(figures.read_text())["auc"])
    done = subprocess.run(
        [sys.executable, "-c", code, "train", "--data", "nowhere.tsv"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == "Error: Click log 'nowhere.tsv' does not exist.\n"


@pytest.mark.process
def test_importing_hotbed_imports_neither_typer_nor_rich():
    code = "import sys, hotbed; print(sorted({'typer', 'rich', 'safetensors'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
