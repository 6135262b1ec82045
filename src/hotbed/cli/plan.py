"""`hotbed plan`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from hotbed.cli.errors import in_one_sentence
from hotbed.cli.options import command, made_of
from hotbed.models import MODELS
from hotbed.train.options import FILE, SIZE, Kind, OneOf

if TYPE_CHECKING:
    from hotbed.dist import Plan
    from hotbed.optim import TableOptimizer
    from hotbed.tables import Table
    from hotbed.train.run_plan import PlanOfRun

_NUMBER = Kind("N", is_path=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """The options of `hotbed plan`."""

    path: Annotated[str | None, Kind("DIR", is_positional=True)] = None
    """A checkpoint, or a folder of them: plan its tables."""
    tables: Annotated[str | None, FILE] = None
    """Plan the tables in a TOML file, as below."""
    model: Annotated[str | None, OneOf(MODELS)] = None
    """Plan a model on click logs: {choices}, as hotbed train makes it."""
    dim: int = 16
    """Of --model and --schema: width of the tables."""
    world_size: int = 8
    """Number of ranks, a process each."""
    local_world_size: Annotated[int | None, _NUMBER] = None
    """Ranks of a machine. With --optimizer, machines keep rows of pooled tables, and each of their ranks some
    columns of these. Predicted steps are those of hotbed train --local-world-size. Default: the run's of
    --from."""
    strategy: Annotated[str | None, Kind("NAME", is_path=False)] = None
    """auto, basic, memory_balanced, memory_optimized or measured. Default: measured with --measure or
    --rates, else auto."""
    measure: bool = False
    """Measure this machine by two processes, in some seconds, and predict steps by it."""
    rates: Annotated[str | None, FILE] = None
    """Figures of a machine: written by --measure, or read without it."""
    data: Annotated[tuple[str, ...], Kind("PATH")] = ()
    """Count what batches ask of tables in these click logs or, with --schema, files. Default: one id for each
    sample, by a power law."""
    from_: Annotated[str | None, Kind("RUN")] = None
    """Record of a run on several ranks (hotbed train --run): plan its tables by what its batches asked, and
    tell whether that is 5 % faster than its plan. Measures this machine unless --rates is given."""
    schema: Annotated[str | None, FILE] = None
    """Columns of --data; its tables are planned where no others are named."""
    batch_size: int = 16_384
    """Of --data: samples of all ranks together."""
    column_slice_threshold: Annotated[int | None, _NUMBER] = None
    """Most elements of a slice of columns."""
    row_slice_threshold: Annotated[int | None, _NUMBER] = None
    """Tables of so many elements are cut by row."""
    data_parallel_threshold: Annotated[int | None, _NUMBER] = None
    """Tables of at most so many are replicated."""
    optimizer: Annotated[str | None, Kind("NAME", is_path=False)] = None
    """Count its states. Default: the checkpoint's, or none."""
    expected_rows: Annotated[tuple[str, ...], Kind("[TABLE=]ROWS", is_path=False)] = ()
    """Rows of a dynamic table, or of all that are not named. Default: the checkpoint's."""
    memory: Annotated[str | None, SIZE] = None
    """What a rank holds, like 80GB."""
    device: Annotated[str | None, SIZE] = None
    """Instead: memory of a rank's GPU,"""
    host: Annotated[str | None, SIZE] = None
    """its RAM,"""
    ssd: Annotated[str | None, SIZE] = None
    """its SSD."""
    write: Annotated[str | None, FILE] = None
    """Write the plan as TOML."""


@command(PlanSettings)
def plan(given: dict[str, object]) -> None:
    """Show which rank would keep which part of which table. Nothing runs and no memory is taken.

    If a rank keeps more than it holds, the exit code is 2 and the three cheapest remedies are told.

    [bold]Examples[/bold]

      [cyan]hotbed plan --model dlrm --world-size 8 --expected-rows 10_000_000 --memory 1GB[/cyan]
      Shows where the 26 tables of a DLRM on click logs go.

      [cyan]hotbed plan runs/1 --world-size 4 --device 8GB --host 64GB[/cyan]
      Takes tables, numbers of rows and optimizer from a checkpoint.

      [cyan]hotbed plan --tables tables.toml --world-size 64 --optimizer adagrad --write plan.toml[/cyan]
      Takes them from a file with a section for each table, and writes the plan for Plan.read:

        \\[tables.item]
        rows = 10_000_000       # leave out for a dynamic table, which may have expected_rows
        dim = 64
        dtype = "bfloat16"      # may be left out: float32
        sharding = "row"        # may be left out; or replicated, table, column, grid

      [cyan]hotbed plan --schema schema.toml --data days/ --world-size 2 --measure --rates rates.toml[/cyan]
      Plans by what this machine's steps are predicted to take, and keeps its figures for other plans.
    """
    from rich.console import Console

    with in_one_sentence(given):
        asked = made_of(PlanSettings, given)
        _check_outputs(asked)
        made, told = _plan(asked)
        typer.echo(made.printed(Console().width))
        if told:
            typer.echo(told)
        if asked.write is not None:
            made.write(asked.write)


def _check_outputs(asked: PlanSettings) -> None:
    from hotbed.checkpoint.folder import is_of_checkpoints
    from hotbed.train.paths import Folder, Named, refuse_clashes
    from hotbed.train.report import check_writable_file

    writes = {"--write": asked.write, "--rates": asked.rates if asked.measure else None}
    written = [Named(option, path) for option, path in writes.items() if path is not None]
    named = {"--tables": asked.tables, "--schema": asked.schema}
    reads = [Named(option, path) for option, path in named.items() if path is not None]
    reads += [Named("--data", path) for path in asked.data]
    folders = [] if asked.path is None else [Folder(Named("DIR", asked.path), is_of_checkpoints)]
    if written:
        refuse_clashes(reads, written, folders)
    for each in written:
        check_writable_file(each.path)


def _plan(asked: PlanSettings) -> tuple[Plan, str]:
    """Return the plan, and what there is to say about it."""
    from hotbed.cli.config import ConfigError
    from hotbed.cli.plan_costs import better_than, measured_of, run_of
    from hotbed.dist import plan as planned
    from hotbed.dist import predict

    run = run_of(asked)
    found, rows, saved_by = _tables(asked, run)
    if run is not None:
        given = asked.local_world_size
        local = run.local_world_size if given is None else given
        asked = dataclasses.replace(asked, world_size=run.plan.world_size, local_world_size=local)
    ranks = _ranks(asked.world_size, asked.local_world_size)
    measured = measured_of(asked, found, run)
    if asked.strategy == "measured" and measured is None:
        raise ConfigError("--strategy measured needs figures: give --measure, or --rates FILE.")
    tiers = {"device": asked.device, "host": asked.host, "ssd": asked.ssd}
    is_measured = measured is not None and asked.strategy in (None, "measured")
    made = planned(
        found,
        ranks,
        strategy=measured if measured is not None and is_measured else asked.strategy or "auto",
        column_slice_threshold=asked.column_slice_threshold,
        row_slice_threshold=asked.row_slice_threshold,
        data_parallel_threshold=asked.data_parallel_threshold,
        optimizer=asked.optimizer or saved_by,
        expected_rows=rows | _expected(found, rows, asked.expected_rows),
        storage={name: size for name, size in tiers.items() if size is not None} or None,
        memory=asked.memory,
    )
    if measured is None:
        return made, ""
    made = made if is_measured else predict(made, measured)
    return (made, "") if run is None else better_than(run, made, measured)


def _ranks(world_size: int, local: int | None) -> int | tuple[int, int]:
    from hotbed.cli.config import ConfigError

    if local is None:
        return world_size
    if local < 1 or world_size % local:
        raise ConfigError(
            f"--local-world-size {local} must divide the {world_size} ranks: it is how many each machine has."
        )
    return world_size // local, local


_Found = tuple[list["Table"], dict[str, int], "str | type[TableOptimizer] | None"]
"""(tables, rows of dynamic ones, optimizer), as far as they are known."""


def _tables(asked: PlanSettings, run: PlanOfRun | None) -> _Found:
    from hotbed.cli.config import ConfigError
    from hotbed.cli.plan_costs import schema_of

    path, file, model = asked.path, asked.tables, asked.model
    given = sum(each is not None for each in (path, file, model))
    if run is not None and given == 0:
        return list(run.plan.tables.values()), run.expected_rows, run.optimizer
    if given == 0 and (schema := schema_of(asked)) is not None:
        return schema.tables(asked.dim), {}, None
    if given != 1 or run is not None:
        raise ConfigError(
            "Name the tables to plan by one of DIR, --tables FILE or --model NAME."
            if run is None
            else "--from RUN names the tables; leave out DIR, --tables and --model."
        )
    if path is not None:
        return _of_checkpoint(path)
    if file is not None:
        return _of_file(file)
    from hotbed.data import CATEGORIES
    from hotbed.dist.planning import tables_in

    if model not in MODELS:
        raise ConfigError(f"--model is {model!r}; it must be one of {', '.join(MODELS)}.")
    return tables_in(MODELS[model](CATEGORIES, dim=asked.dim)), {}, None


def _of_checkpoint(path: str) -> _Found:
    """Its tables go by their names in the model, without the module's that all have in common."""
    import torch

    from hotbed.checkpoint.inspect import contents, stored_rows
    from hotbed.optim import RULES
    from hotbed.tables import Table

    saved, counts = contents(path)["tables"], stored_rows(path)
    common = os.path.commonprefix([each["table"] for each in saved]).rpartition(".")
    start = len(common[0] + common[1])
    found, rows = [], {}
    for each in saved:
        name = each["table"][start:]
        found.append(Table(name, each["dim"], each["rows"], dtype=getattr(torch, each["dtype"])))
        if each["rows"] is None:
            rows[name] = counts[each["table"]]
    rules = {each["rule"] for each in saved}
    named = [rule for rule in RULES if rules == {rule.declared_rule().core}]
    return found, rows, named[0] if named else None


def _of_file(file: str) -> _Found:
    import torch

    from hotbed.cli.config import ConfigError, read_options
    from hotbed.tables import Table

    sections = read_options(file, "--tables").get("tables")
    if not isinstance(sections, dict) or not sections:
        raise ConfigError(f"{file} has no [tables.NAME]; each is a table with rows and dim.")
    found, rows = [], {}
    for name, section in sections.items():
        fields = dict(section) if isinstance(section, dict) else {}
        more = [k for k in fields if k not in ("rows", "dim", "dtype", "sharding", "expected_rows")]
        if "dim" not in fields or more:
            wrong = f"unknown key {more[0]!r}" if more else "dim is missing"
            raise ConfigError(f"{file}, table {name!r}: {wrong}; see hotbed plan --help.")
        if "expected_rows" in fields:
            rows[name] = fields.pop("expected_rows")
        given = fields.get("dtype", "float32")
        dtype = getattr(torch, given, given) if isinstance(given, str) else given
        found.append(Table(name, **{**fields, "dtype": dtype}))
    return found, rows, None


def _expected(
    tables: Sequence[Table], known: dict[str, int], given: Sequence[str]
) -> dict[str, int]:
    from hotbed.cli.config import ConfigError

    rows: dict[str, int] = {}
    for text in given:
        name, named, number = text.rpartition("=")
        try:
            count = int(number)
        except ValueError:
            raise ConfigError(
                f"--expected-rows {text}: give a number of rows, or TABLE=ROWS."
            ) from None
        others = [t.name for t in tables if t.rows is None and t.name not in known]
        for each in [name] if named else others:
            if named or each not in rows:
                rows[each] = count
    return rows
