"""What `simulate` assumes of GPUs, links, hosts and a click model, each line with its source."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable

from benchmarks import simulated_model as model
from hotbed.dist import Rates

__all__ = [
    "ASSUMED",
    "KERNELS_OF",
    "NETWORKS",
    "Assumption",
    "AssumptionError",
    "Assumptions",
    "host_lines",
]

NETWORKS = ("InfiniBand", "Ethernet")
ASSUMED = "assumed"
"""Beginning of the source of what nobody has published or measured."""

_SCALES = {
    "": 1.0,
    "bytes": 1.0,
    "GB": 1e9,
    "GB/s": 1e9,
    "TFLOP/s": 1e12,
    "MFLOP": 1e6,
    "million": 1e6,
    "µs": 1e-6,
    "ns": 1e-9,
}

_SHARES = ("share", "kernels", "utilisation", "hidden")
"""Parts of names of what is at most 1."""
_ADDED_UNITS = ("µs", "ns", "bytes", "MFLOP", "million")
_MAY_BE_ZERO = ("skew", "hidden dense gradients", "host work not hidden", "turns on cores")
"""Lines that may be 0; by the others something is divided."""
_WHOLE = ("GPUs a machine", "dim", "batch")

_H100 = "NVIDIA H100 SXM data sheet"
_DGX = "NVIDIA DGX H100 user guide"
_TABLES = "NVIDIA/recsys-examples, dynamicemb's benchmark_results.json (one H100, 1,048,570 ids x 128, SGD)"
_NCCL = "NVIDIA/nccl, src/graph/tuning.cc"
_MLPERF = "MLPerf's DLRM-DCNv2: mlcommons/training, recommendation_v2/torchrec_dlrm"


class AssumptionError(ValueError):
    """An assumption that does not exist, or a value that it cannot have."""


@dataclasses.dataclass(frozen=True, slots=True)
class Assumption:
    """One line of the table."""

    name: str
    value: float | str
    unit: str
    source: str
    """Where it is published or how it was measured; or "assumed", and why."""

    @property
    def number(self) -> float:
        """Return the value in bytes, seconds, FLOP, or as it is."""
        assert not isinstance(self.value, str), self.name
        return self.value * _SCALES[self.unit]


CARD = (
    Assumption("memory", 80, "GB", _H100),
    Assumption("share of memory for tables", 0.8, "", "assumed: the rest is for layers and messages"),
    Assumption("memory bandwidth", 3350, "GB/s", _H100),
    Assumption(
        "forward kernels", 0.63, "",
        f"{_TABLES}: FBGEMM's forward, 0.34 ms for 716 MB (distinct rows and vectors), of 3,350 GB/s",
    ),
    Assumption(
        "backward kernels", 0.44, "",
        f"{_TABLES}: FBGEMM's backward, 0.61 ms for 895 MB (gradients, rows read and written)",
    ),
    Assumption(
        "deduplication", 0.44, "ns",
        f"{_TABLES}: 24 % of dynamicemb's 1.92 ms, by its profile; an id",
    ),
    Assumption("dense FLOP/s", 494.7, "TFLOP/s", f"{_H100}: TF32 without sparsity"),
    Assumption("dense utilisation", 0.4, "", "assumed: share of the peak in the dense part"),
)  # fmt: skip

LINKS = (
    Assumption("GPUs a machine", 8, "", _DGX),
    Assumption("NVLink", 450, "GB/s", f"{_H100}: 900 GB/s in both directions together"),
    Assumption("NVLink share", 0.82, "", "NVIDIA/nccl-tests issue 212: NCCL reaches 370 of 450 GB/s"),
    Assumption("PCIe", 64, "GB/s", f"{_H100}: Gen5, 128 GB/s in both directions together"),
    Assumption("PCIe share", 0.86, "", "assumed: 55 of 64 GB/s for copies of rows"),
    Assumption("host memory", 250, "GB", f"{_DGX}: 2 TB a machine; a GPU's"),
    Assumption("InfiniBand NIC", 50, "GB/s", f"{_DGX}: one ConnectX-7 of 400 Gb/s a GPU"),
    Assumption("Ethernet NIC", 12.5, "GB/s", "assumed: 100 Gb/s a GPU"),
    Assumption(
        "NIC share of an all-to-all", 0.78, "",
        "deepseek-ai/DeepEP, docs/legacy.md: 39 of 50 GB/s among 128 and among 256 GPUs",
    ),
    Assumption(
        "NIC share of a collective", 0.96, "", "NVIDIA/nccl-tests issue 267: 48 of 50 GB/s a ConnectX-7"
    ),
    Assumption("start of a collective", 6.6, "µs", f"{_NCCL}: baseLat, ring, LL"),
    Assumption("ring step over NVLink", 1.08, "µs", f"{_NCCL}: hwLat, ring, LL, 0.6 by 1.8 between machines"),
    Assumption("ring step over InfiniBand", 2.7, "µs", f"{_NCCL}: hwLat of NET, ring, LL"),
    Assumption("ring step over Ethernet", 5.4, "µs", "assumed: twice that over InfiniBand"),
    Assumption("message to a rank", 0.5, "µs", "assumed: for each other rank in an all-to-all"),
    Assumption("handshake", 8264, "bytes", "hotbed.dist.ranks: 1,033 numbers a rank, gathered by all"),
    Assumption("hidden dense gradients", 0, "", "assumed: share of their all-reduce behind the backward"),
)  # fmt: skip

HOST = (
    Assumption("host speed", 1, "", "assumed: times as fast as the machine of the host's lines"),
    Assumption("host work not hidden", 1, "", "assumed: share of the host's work that the GPU waits for"),
)  # fmt: skip

HERE = (
    Assumption(
        "turns on cores", 1, "",
        "assumed: on this machine, n processes on fewer cores take n / cores times as long (0: no longer)",
    ),
)  # fmt: skip

MODEL = (
    Assumption("tables", len(model.ROWS), "", f"{_MLPERF}; {sum(model.ROWS):,} rows in all"),
    Assumption("rows", 1, "", f"{_MLPERF}; times those of each table"),
    Assumption("ids a bag", 1, "", f"{_MLPERF}; times those of a table, {sum(model.IDS)} in all"),
    Assumption("dim", 128, "", _MLPERF),
    Assumption("skew", 1.05, "", "assumed: exponent of the power law of ids, as in the other scenarios"),
    Assumption("batch", 6912, "", "MLPerf Training, NVIDIA on 8 H100: 55,296; of a GPU"),
    Assumption("optimizer", "adagrad", "", _MLPERF),
    Assumption("rows travel as", "stored", "", "assumed: float32, the default of hotbed.distribute(rows=)"),
    Assumption("gradients travel as", "stored", "", "assumed: the default of hotbed.distribute(gradients=)"),
    Assumption(
        "dense FLOP", round(model.FLOP_A_SAMPLE / 1e6, 1), "MFLOP",
        f"{_MLPERF}; arithmetic from its widths, forward and twice as many backward; a sample",
    ),
    Assumption(
        "dense parameters", round(model.PARAMETERS / 1e6, 2), "million",
        f"{_MLPERF}; arithmetic from its widths",
    ),
)  # fmt: skip

_MOVES = {
    "ordered_id": (32, "forward", "an id and its position read and written"),
    "row": (16, "forward", "an id and an address read"),
    "row_byte": (3, "forward", "read, written to a message, read there"),
    "bag_row": (16, "forward", "an id and an address read"),
    "bag_byte": (1, "forward", "read, also where a row comes again"),
    "vector_byte": (1, "forward", "written"),
    "backward_id": (16, "backward", "a position read and written"),
    "backward_byte": (1, "backward", "read"),
    "ordered_gradient": (16, "backward", "a position read and written"),
    "written_byte": (1, "backward", "written"),
    "gradient_row": (16, "backward", "a position read and written"),
    "gradient_byte": (1, "backward", "read"),
    "bag_gradient_row": (16, "backward", "a position read and written"),
    "bag_gradient_byte": (1, "backward", "read"),
    "updated_row": (8, "backward", "an address read"),
    "updated_byte": (2, "backward", "read and written"),
}
"""Bytes that a GPU moves for a unit of `hotbed.dist.Rates`, and by which kernels."""

KERNELS_OF = {unit: f"{kernels} kernels" for unit, (_, kernels, _) in _MOVES.items()}
"""Unit → assumption that says how fast its kernels move bytes."""

MOVES = tuple(
    Assumption(f"moved: {unit}", nbytes, "bytes", f"assumed: {why}")
    for unit, (nbytes, _, why) in _MOVES.items()
)


_HOST_UNITS = (
    "forward_call", "forward_table", "forward_feature", "backward_call", "backward_table", "step_call",
    "step_table", "step_feature",
)  # fmt: skip


def host_lines(rates: Rates, source: str) -> list[Assumption]:
    """Return lines of the work that hosts do for GPUs: calls, tables and features.

    Args:
        rates: of a machine with as fast processors.
        source: where they come from.
    """
    return [
        Assumption(f"host: {unit}", round(getattr(rates, unit) * 1e6, 2), "µs", source)
        for unit in _HOST_UNITS
    ]


class Assumptions:
    """The table, by name.

    Raises:
        AssumptionError: a name that does not exist, or a value that cannot be.
    """

    def __init__(self, lines: Iterable[Assumption] | None = None) -> None:
        """`lines`: default: all, with the host's of `hotbed.dist.Rates()`."""
        if lines is None:
            of_host = host_lines(
                Rates(), "defaults of hotbed.dist.Rates, measured on two cores of an AMD EPYC"
            )
            lines = (*CARD, *LINKS, *HOST, *of_host, *MODEL, *MOVES, *HERE)
        self.lines = {line.name: line for line in lines}

    def __getitem__(self, name: str) -> float:
        """Return a value in bytes, seconds, FLOP, or as it is."""
        return self.lines[self._known(name)].number

    def text(self, name: str) -> str:
        """Return a value that is no number."""
        return str(self.lines[self._known(name)].value)

    def changed(self, name: str, value: float | str, source: str = ASSUMED) -> Assumptions:
        """Return the table with another value, in the unit of its line."""
        line = self.lines[self._known(name)]
        if name == "tables":
            raise AssumptionError("'tables' says how many there are; change 'rows' or 'ids a bag'.")
        is_text = isinstance(line.value, str)
        if is_text != isinstance(value, str):
            raise AssumptionError(
                f"{name!r} must be {'a name' if is_text else 'a number'}, not {value!r}."
            )
        if not isinstance(value, str) and (limits := _broken_limits(line, value)):
            raise AssumptionError(f"{name!r} must be {limits}, not {value!r}.")
        made = dataclasses.replace(line, value=value, source=source)
        return Assumptions({**self.lines, name: made}.values())

    def with_lines(self, lines: Iterable[Assumption]) -> Assumptions:
        """Return the table with other lines in place of those of the same names."""
        return Assumptions({**self.lines, **{line.name: line for line in lines}}.values())

    def parsed(self, texts: Iterable[str]) -> Assumptions:
        """Return the table with the values of texts such as ``"NVLink=300"``."""
        found = self
        for text in texts:
            name, is_given, value = text.partition("=")
            if not is_given:
                raise AssumptionError(f"Expected NAME=VALUE, got {text!r}.")
            line = found.lines[found._known(name.strip())]
            found = found.changed(line.name, _parsed(line, value.strip()), "given by --set")
        return found

    def _known(self, name: str) -> str:
        if name not in self.lines:
            near = difflib.get_close_matches(name, self.lines, n=1)
            asked = f" Did you mean {near[0]!r}?" if near else ""
            raise AssumptionError(f"There is no assumption {name!r}.{asked}")
        return name


def _broken_limits(line: Assumption, value: float) -> str:
    """Return what numbers a line takes, if this is none of them."""
    is_share = any(word in line.name for word in _SHARES)
    most = 1.0 if is_share else math.inf
    if not (math.isfinite(value) and 0 <= value <= most):
        return "from 0 to 1" if is_share else "a number from 0 on"
    if value == 0 and not (line.unit in _ADDED_UNITS or line.name in _MAY_BE_ZERO):
        return "above 0"
    return "a whole number" if line.name in _WHOLE and value != int(value) else ""


def _parsed(line: Assumption, value: str) -> float | str:
    if isinstance(line.value, str):
        return value
    try:
        return float(value)
    except ValueError:
        raise AssumptionError(f"{line.name!r} must be a number, not {value!r}.") from None
