"""A training step over whole tables on a CUDA device as a CUDA graph: launched at one stroke."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from hotbed.jagged import Jagged
from hotbed.ops.gpu.recording import Recording, Rehearsal, staged
from hotbed.optim.base import TableOptimizer
from hotbed.table.live import LiveTable, live_table
from hotbed.table.participant import raise_of_last_step
from hotbed.table.place import Place

__all__ = ["CudaGraph", "StepGraphs", "graphed"]

R = TypeVar("R")

REHEARSALS = 3
"""Steps that run as ever before one is recorded: kernels are compiled and memory is found in them."""

MOST = 4
"""Graphs of one step. Each keeps the memory of a whole step."""


def graphed(step: Callable[..., R], optimizer: TableOptimizer) -> StepGraphs[R]:
    """Make a training step a CUDA graph: the host launches it at one stroke, not kernel by kernel.

    >>> def step(batch):
    ...     loss = loss_fn(model(batch), batch["label"])
    ...     optimizer.zero_grad(); loss.backward(); optimizer.step()
    ...     return loss
    >>> step = hb.graphed(step, optimizer)
    >>> for batch in loader:
    ...     loss = step(batch)

    For models whose tables lie on one CUDA device whole. The first steps run as ever; then a step is
    recorded for each layout of a batch (shapes and dtypes, 4 at most), and batches of that layout
    replay it. Everything else runs as ever: other layouts, tables on the host or in tiers, a step
    that cannot be recorded, of which a warning tells.

    Rows and states get the same bits as without, `optimizer`'s numbers may change from step to step
    (schedulers), and the dense parameters that it has are stepped beside the graph. But what Python
    decides in `step`, and what it keeps there, is decided and kept when the step is recorded:
    ``forget()`` has it recorded anew. Nothing in it may wait for the device. Of another optimizer
    in it torch's rules of recording hold (``capturable=True``).

    Args:
        step: a whole step: forward, backward, ``optimizer.step()``, with one forward and backward.
            Its arguments are tensors, `Jagged`, other values that compare equal from step to step, and
            dicts, lists and tuples of these; tensors are brought to the device, page-locked ones
            behind the caller's back, who must not refill them at once. What it returns is a copy,
            without history.
        optimizer: one of `hotbed.optim`, over the tables.

    Raises:
        TypeError: it is another optimizer.
    """
    if not isinstance(optimizer, TableOptimizer):
        raise TypeError(
            f"hotbed.graphed: {type(optimizer).__name__} is no optimizer of tables. Pass the one of "
            "hotbed.optim that steps them."
        )
    return StepGraphs(step, optimizer)


@lru_cache(maxsize=16)
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """The stream on which steps are rehearsed and recorded. One for all: what autograd keeps of an
    earlier step would else run on another one, which a recording must not wait for."""
    made: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return made


class CudaGraph:
    """A graph of CUDA, recorded on a stream of its own and replayed on the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream_of(device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def rehearse(self, function: Callable[[], R]) -> R:
        """Runs it where it will be recorded, behind what is launched so far."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                return function()
        finally:  # what was launched before an error was launched
            current.wait_stream(self._stream)

    def record(self, function: Callable[[], R]) -> R:
        """Records its launches; none is done. Its tensors lie in the graph's memory."""
        self._graph = torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle()
        # Other threads, such as those that pin a loader's batches, may go on.
        graph = torch.cuda.graph(self._graph, pool, self._stream, "thread_local")
        failure: Exception | None = None
        # A graph whose recording was broken off leaves torch on its stream; this does not.
        with torch.cuda.stream(self._stream):
            try:
                with graph:
                    try:
                        return function()
                    except Exception as error:
                        failure = error
                        raise
            except Exception:
                self._clear_up(pool)
                if failure is not None:
                    raise failure from None  # what ending the recording said after it tells less
                raise

    def _clear_up(self, pool: tuple[int, int]) -> None:
        """After a recording that was broken off: some releases of torch go on to believe in it. Memory
        that another stream uses would never be free again, and random numbers would be refused."""
        with contextlib.suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(self._device.index, pool)
        graph = torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream)
        with contextlib.suppress(RuntimeError), graph:
            torch.zeros(1, device=self._device)

    def replay(self) -> None:
        assert self._graph is not None
        self._graph.replay()


class _Graph(NamedTuple):
    """One recorded step."""

    graph: CudaGraph
    recording: Recording
    inputs: list[Tensor]
    """Where a replay reads its batch."""
    outputs: object
    rows: list[tuple[LiveTable, Place, tuple[Tensor, ...], int]]
    """Of each table the planes whose addresses were recorded."""
    dense: list[tuple[Tensor, int]]
    """The optimizer's dense parameters, and where they lay."""

    def holds(self) -> bool:
        """Whether tables and dense parameters still lie where they lay."""
        return all(p.data_ptr() == address for p, address in self.dense) and all(
            table.place is rows
            and table.generation == generation
            and list(map(id, _planes(rows))) == list(map(id, planes))
            for table, rows, planes, generation in self.rows
        )


GRAPHS: dict[str, type[CudaGraph]] = {"cuda": CudaGraph}
"""Kind of device → its graphs."""


class StepGraphs(Generic[R]):
    """Training step that is recorded and replayed; `graphed` returns it.

    Threading: for the training thread.
    """

    def __init__(self, function: Callable[..., R], optimizer: TableOptimizer) -> None:
        self._function, self._optimizer = function, optimizer
        self._rehearsed: dict[Hashable, tuple[int, int, CudaGraph]] = {}
        self._graphs: dict[Hashable, _Graph] = {}
        self.refused = ""
        """Why steps run one launch after the other from now on; "" as long as they do not."""

    @property
    def recorded(self) -> int:
        """Graphs that there are: one for each layout of a batch."""
        return len(self._graphs)

    def forget(self) -> None:
        """Drops all graphs: the next steps record anew what the function does by then."""
        self._rehearsed.clear()
        self._graphs.clear()

    def __call__(self, *batch: object) -> R:
        device = self._device()
        if device is None or self.refused:
            return self._function(*batch)
        tensors: list[Tensor] = []
        try:
            groups = tuple(len(group["params"]) for group in self._optimizer.param_groups)
            layout = groups, _layout(batch, tensors)
            hash(layout)
        except TypeError:
            return self._function(*batch)
        known = self._graphs.get(layout)
        if known is not None:
            # What the last step was refused for is told before its batch is overwritten.
            self._raise_of_last_step(table for table, *_ in known.rows)
            if self._renumbered(known):
                return self._replay(known, tensors)
            self.forget()
        count, room, graph = self._rehearsed.get(layout, (0, 0, None))
        if count < REHEARSALS or self.recorded >= MOST:
            if graph is None:
                if len(self._rehearsed) >= 16 * MOST:
                    return self._function(*batch)  # every batch has another layout
                graph = GRAPHS[device.type](device)
            there = iter([tensor.to(device, non_blocking=True) for tensor in tensors])
            return self._rehearse(layout, count, graph, _rebuilt(batch, lambda _: next(there)))
        assert graph is not None
        self._raise_of_last_step()
        recorded = self._record(device, layout, room, graph, batch, tensors)
        return self._function(*batch) if recorded is None else self._replay(recorded, tensors)

    def _device(self) -> torch.device | None:
        """Where all tables lie, if that is one device that makes graphs."""
        devices = {table.place.recorded_on for table in self._optimizer.tables}
        if len(devices) != 1:
            return None
        device = devices.pop()
        return device if device is not None and device.type in GRAPHS else None

    def _raise_of_last_step(self, tables: Iterable[LiveTable] = ()) -> None:
        raise_of_last_step(self._optimizer)
        self._optimizer.raise_of_last_backward()
        for table in tables:  # in steps that are not replayed, forward takes these
            table.refuse_half_loaded()
            table.place.lookups.raise_deferred([table])

    def _rehearse(
        self, layout: Hashable, count: int, graph: CudaGraph, batch: tuple[object, ...]
    ) -> R:
        rehearsal = Rehearsal()
        with staged(rehearsal):
            result = graph.rehearse(lambda: self._function(*batch))
        self._rehearsed[layout] = count + 1, rehearsal.room, graph
        # History that the caller keeps would keep streams of this step for the next.
        mine: R = _rebuilt(result, Tensor.detach)
        return mine

    def _record(
        self,
        device: torch.device,
        layout: Hashable,
        room: int,
        graph: CudaGraph,
        batch: tuple[object, ...],
        tensors: Sequence[Tensor],
    ) -> _Graph | None:
        """None: it cannot be recorded, and nothing has changed."""
        inputs = [torch.empty_like(t, device=device) for t in tensors]
        source = iter(inputs)
        recording = Recording(device, 2 * room + 1024)
        # A weight that autocast has cast before would not be cast by replays, and what it casts now
        # has no values yet.
        torch.clear_autocast_cache()
        try:
            with staged(recording):
                outputs = graph.record(
                    lambda: self._function(*_rebuilt(batch, lambda _: next(source)))
                )
            outputs = _rebuilt(outputs, Tensor.detach)
        except Exception as error:
            self.refused = f"{type(error).__name__}: {error}"
            warnings.warn(
                f"hotbed.graphed: the step cannot become a CUDA graph and runs as ever. {self.refused}",
                stacklevel=4,
            )
            self._optimizer.zero_grad(set_to_none=True)
            self.forget()
            return None
        finally:
            torch.clear_autocast_cache()
        recording.fill()
        rows = [(t, t.place, _planes(t.place), t.generation)
                for t in recording.tables.values() if isinstance(t, LiveTable)]  # fmt: skip
        del self._rehearsed[layout]
        dense = [
            (p, p.data_ptr())
            for group in self._optimizer.param_groups
            for p in group["params"]
            if live_table(p) is None
        ]
        found = self._graphs[layout] = _Graph(graph, recording, inputs, outputs, rows, dense)
        return found

    def _renumbered(self, known: _Graph) -> bool:
        """Gives a recorded step its numbers; False: it is not the step to come any more."""
        if not known.holds():
            return False
        for index in range(len(self._optimizer.param_groups)):
            self._optimizer.numbers_of_step(index)
        return all(renumber() for renumber in known.recording.before)

    def _replay(self, known: _Graph, tensors: Sequence[Tensor]) -> R:
        with torch.no_grad():
            for there, tensor in zip(known.inputs, tensors, strict=True):
                there.copy_(tensor, non_blocking=True)
            known.graph.replay()
            for action in known.recording.after:
                action()
            mine: R = _rebuilt(known.outputs, Tensor.clone)  # the next replay overwrites them
            return mine


class _Whole(Protocol):
    plane: Tensor
    states: list[Tensor]


def _planes(rows: Place) -> tuple[Tensor, ...]:
    whole = cast(_Whole, rows)  # as are those whose steps are recorded
    return whole.plane, *whole.states


def _layout(part: object, tensors: list[Tensor]) -> Hashable:
    """Return what batches that one graph serves have in common; collect the tensors on the way.

    Raises TypeError for tensors that cannot be copied into others of their shape.
    """
    if isinstance(part, Tensor):
        if part.layout is not torch.strided or part.is_nested or part.requires_grad:
            raise TypeError
        tensors.append(part)
        return part.shape, part.dtype
    if isinstance(part, Jagged):
        return Jagged, _layout((part.values, part.offsets, part.weights), tensors)
    if isinstance(part, dict):
        return dict, tuple((name, _layout(one, tensors)) for name, one in part.items())
    if isinstance(part, (list, tuple)):
        return type(part), tuple(_layout(one, tensors) for one in part)
    return type(part), part


def _rebuilt(part: Any, other: Callable[[Tensor], Tensor]) -> Any:
    """`part` with another tensor in the place of each, in the order of `_layout`."""
    if isinstance(part, Tensor):
        return other(part)
    if isinstance(part, Jagged):
        values, offsets, weights = _rebuilt((part.values, part.offsets, part.weights), other)
        return Jagged(values, offsets, weights=weights)
    if isinstance(part, dict):
        return {name: _rebuilt(one, other) for name, one in part.items()}
    if isinstance(part, (list, tuple)):
        made = [_rebuilt(one, other) for one in part]
        return type(part)(*made) if hasattr(part, "_fields") else type(part)(made)
    return part
