"""Options from a TOML file."""

import json

import pytest
from cli.command_line import run


def test_config_file(log, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text(
        f'data = ["{log}"]\ndim = 3\nbatch-size = 100\nlr = 1\noptimizer = "sgd"\ntest_fraction = 0.5\n'
    )
    figures = tmp_path / "figures.json"
    result = run("train", "--config", config, "--lr", 0.05, "--json", figures)
    assert result.exit_code == 0, result.output
    used = json.loads(figures.read_text())["config"]
    assert (used["dim"], used["batch_size"], used["optimizer"]) == (3, 100, "sgd")
    assert used["lr"] == 0.05 and used["test_fraction"] == 0.5 and used["data"] == [str(log)]
    config.write_text(f'data = "{log}"\ndim = 2\n')
    assert run("train", "--json", figures, "--config", config).exit_code == 0
    assert json.loads(figures.read_text())["config"]["data"] == [str(log)]


def test_a_config_file_has_switches_and_numbers_that_may_be_left_out(log, tmp_path):
    config, figures = tmp_path / "run.toml", tmp_path / "figures.json"
    config.write_text(
        f'data = "{log}"\ndim = 2\nhorizon = 7\nhost = "100MB"\nssd = "{tmp_path / "rows"}"\n'
        f'reset-ssd = true\nresume = true\ncheckpoint = "{tmp_path / "run"}"\n'
    )
    for _ in range(2):
        result = run("train", "--config", config, "--json", figures)
        assert result.exit_code == 0, result.output
    report = json.loads(figures.read_text())
    assert report["resumed_at"] == report["steps"] > 0
    used = report["config"]
    assert (used["horizon"], used["reset_ssd"], used["resume"]) == (7, True, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("resume = 'yes'", "key 'resume' is 'yes'; it must be true or false."),
        ("horizon = true", "key 'horizon' is True; it must be an integer."),
        ("batchsize = 5", "unknown key 'batchsize'; did you mean 'batch-size'?"),
        ("zebra = 5", "unknown key 'zebra'; there are data, schema, from, model, set"),
        ("[train]\ndim = 5", "unknown key 'train'"),
        ("dim = 1.5", "key 'dim' is 1.5; it must be an integer."),
        ("epochs = true", "key 'epochs' is True; it must be an integer."),
        ("lr = 'fast'", "key 'lr' is 'fast'; it must be a number."),
        ("model = 3", "key 'model' is 3; it must be a string."),
        (f"host = {10**30}", f"key 'host' is {10**30}; it must be a string."),
        ("data = [1]", "key 'data' is [1]; it must be a string or a list of strings."),
        ("dim = = 3", "is not TOML"),
    ],
)
def test_a_wrong_config_file(log, tmp_path, text, message):
    config = tmp_path / "run.toml"
    config.write_text(text)
    result = run("train", "--data", log, "--config", config)
    assert result.exit_code == 2
    assert message in result.stderr and str(config) in result.stderr
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    missing = run("train", "--config", tmp_path / "none.toml")
    assert missing.exit_code == 2 and "No such file" in missing.stderr
