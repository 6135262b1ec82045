"""Messages of the library, in the words of the command line."""

from __future__ import annotations

import logging
import warnings

import pytest
import typer

from hotbed.cli.errors import in_one_sentence, in_options
from hotbed.errors import StorageError
from hotbed.storage import Storage


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Raise Storage(host=4,000,000) to at least 7.", "Raise --host 4MB to at least 7."),
        ("Storage(device=4,000,000) is", "--device 4000000 is"),
        ("Storage(ssd='/r') is in use", "--ssd r is in use"),
        ("Pass reset=True to delete", "Pass --reset-ssd to delete"),
        ("with Storage(ssd=...) they", "with --ssd they"),
        ("needs host=, such as host='2GB'.", "needs --host, such as --host 2GB."),
        ("batch_size is 5, not depth=2: the", "batch_size is 5, not --depth 2: the"),
        ("or lower depth. Storage: the tier", "or lower depth. Storage: the tier"),
        ("a, line 3: 5 columns. host of it", "a, line 3: 5 columns. host of it"),
    ],
)
def test_settings_are_options(text: str, shown: str) -> None:
    device = "4,000,000" if "device" in text else None
    typed = {"host": "4MB", "ssd": "r", "device": device and "4000000"}
    assert in_options(text, typed) == shown


@pytest.mark.parametrize(
    "options",
    [{"ssd": "r"}, {"device": 5}, {"host": 0}, {"ssd": __file__, "host": 5}, {"host": "x"}],
)
def test_no_error_of_storage_names_an_argument(options: dict[str, object]) -> None:
    with pytest.raises(StorageError) as raised:
        Storage(**options)
    told = in_options(str(raised.value), options)
    assert "=" not in told and "Storage(" not in told


@pytest.mark.parametrize(
    "error", [StorageError("pass reset=True"), OSError(28, "No space", "/x"), MemoryError()]
)
def test_an_error_is_a_sentence_and_exit_code_2(
    error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended, in_one_sentence():
        raise error
    assert ended.value.exit_code == 2
    told = {StorageError: "pass --reset-ssd", OSError: "/x: No space.", MemoryError: "Not enough"}
    assert capsys.readouterr().err.startswith(f"Error: {told[type(error)]}")


@pytest.mark.parametrize(
    "said",
    [
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried",
        "CUDA out of memory. Tried to allocate 20.00 GiB.",
        "Storage size calculation overflowed with sizes=[4611686018427387904, 367]",
    ],
)
def test_layers_without_room_are_told(said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, in_one_sentence():
        raise RuntimeError(said)
    assert ended.value.exit_code == 2
    assert "Error: Not enough memory for the model's layers. Lower" in capsys.readouterr().err


def test_mistakes_of_the_program_keep_their_traceback() -> None:
    with pytest.raises(RuntimeError, match="a mistake"), in_one_sentence():
        raise RuntimeError("a mistake")


@pytest.mark.filterwarnings("default")
def test_warnings_and_logged_lines_are_notices(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("hotbed")
    before = list(logger.handlers)
    with in_one_sentence({"host": "4MB"}):
        warnings.warn("Raise Storage(host=4,000,000).", stacklevel=2)
        logging.getLogger("hotbed.data").warning("%d lines skipped", 3)
    shown = capsys.readouterr()
    assert shown.err == "Notice: Raise --host 4MB.\nNotice: 3 lines skipped\n" and not shown.out
    assert logger.handlers == before
