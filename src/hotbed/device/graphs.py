"""A training step over whole tables on a CUDA device as a CUDA graph: launched at one stroke."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hotbed.jagged import Jagged
from hotbed.ops.gpu.recording import Recording, Rehearsal, staged
from hotbed.optim.on_device import raise_of_last_step

if TYPE_CHECKING:
    from hotbed.handles import LiveTable
    from hotbed.optim.base import TableOptimizer

__all__ = ["CudaGraph", "StepGraphs", "graphed"]

REHEARSALS = 3
"""Steps that run as ever before one is recorded: kernels are compiled and memory is found in them."""

MOST = 4
"""Graphs of one step. Each keeps the memory of a whole step."""


def graphed(step: Callable[..., Any], optimizer: TableOptimizer) -> StepGraphs:
    """Makes a training step a CUDA graph: the host launches it at one stroke, not kernel by kernel.

    >>> def step(batch, label):
    ...     loss = loss_fn(model(batch), label)
    ...     optimizer.zero_grad(); loss.backward(); optimizer.step()
    ...     return loss
    >>> step = hb.graphed(step, optimizer)
    >>> for batch, label in loader:
    ...     loss = step(batch, label)

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
            dicts, lists and tuples of these; tensors are brought to the device. What it returns is a
            copy, without history.
        optimizer: one of `hotbed.optim`, over the tables.

    Raises:
        TypeError: it is another optimizer.
    """
    from hotbed.optim.base import TableOptimizer

    if not isinstance(optimizer, TableOptimizer):
        raise TypeError(
            f"hotbed.graphed: the optimizer is a {type(optimizer).__name__}. Pass the one of "
            "hotbed.optim that steps the tables."
        )
    return StepGraphs(step, optimizer)


class CudaGraph:
    """A graph of CUDA, recorded on a stream of its own and replayed on the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph: Any = None

    def rehearse(self, function: Callable[[], Any]) -> Any:
        """Runs it where it will be recorded, behind what is launched so far."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = function()
        current.wait_stream(self._stream)
        return result

    def record(self, function: Callable[[], Any]) -> Any:
        """Records its launches; none is done. Its tensors lie in the graph's memory."""
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, such as those that pin a loader's batches, may go on.
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            return function()

    def replay(self) -> None:
        self._graph.replay()


class _Graph(NamedTuple):
    """One recorded step."""

    graph: CudaGraph
    recording: Recording
    inputs: list[Tensor]
    """Where a replay reads its batch."""
    outputs: Any
    rows: list[tuple[LiveTable, Any, tuple[Tensor, ...], int]]
    """Of each table the planes whose addresses were recorded."""

    def holds(self) -> bool:
        """Whether the tables still lie where they lay."""
        return all(
            table.device_rows is rows
            and table.generation == generation
            and all(a is b for a, b in zip(_planes(rows), planes, strict=True))
            for table, rows, planes, generation in self.rows
        )


class StepGraphs:
    """What `graphed` returns.

    Threading: for the training thread.
    """

    make_graph = CudaGraph
    """Of tests: what stands in for a graph of CUDA."""

    def __init__(self, function: Callable[..., Any], optimizer: TableOptimizer) -> None:
        self._function, self._optimizer = function, optimizer
        self._rehearsed: dict[Any, tuple[int, int, CudaGraph]] = {}
        self._graphs: dict[Any, _Graph] = {}
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

    def __call__(self, *batch: Any) -> Any:
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
            self._raise_of_last_step()
            if self._renumbered(known):
                return self._replay(known, tensors)
            self.forget()
        count, room, graph = self._rehearsed.get(layout, (0, 0, None))
        if count < REHEARSALS or self.recorded >= MOST:
            if graph is None:
                if len(self._rehearsed) >= 16 * MOST:
                    return self._function(*batch)  # every batch has another layout
                graph = self.make_graph(device)
            there = iter([tensor.to(device, non_blocking=True) for tensor in tensors])
            return self._rehearse(layout, count, graph, _rebuilt(batch, there))
        assert graph is not None
        self._raise_of_last_step()
        recorded = self._record(device, layout, room, graph, batch, tensors)
        return self._function(*batch) if recorded is None else self._replay(recorded, tensors)

    def _device(self) -> torch.device | None:
        """Where all tables lie, if that is one device that makes graphs."""
        tables = self._optimizer._live.values()
        devices = {None if t.device_rows is None else t.device for t in tables}
        if len(devices) != 1 or any(t.tiers is not None for t in tables):
            return None
        device: torch.device | None = devices.pop()
        cuda = device is not None and device.type == "cuda"
        return device if cuda or self.make_graph is not CudaGraph else None

    def _raise_of_last_step(self) -> None:
        raise_of_last_step(self._optimizer)
        updates = self._optimizer._in_backward
        if updates is not None:
            notice, updates.notice = updates.notice, None
            if notice is not None and (error := notice.take()) is not None:
                raise error

    def _rehearse(self, layout: Any, count: int, graph: CudaGraph, batch: Any) -> Any:
        rehearsal = Rehearsal()
        with staged(rehearsal):
            result = graph.rehearse(lambda: self._function(*batch))
        self._rehearsed[layout] = count + 1, rehearsal.room, graph
        return result

    def _record(
        self,
        device: torch.device,
        layout: Any,
        room: int,
        graph: CudaGraph,
        batch: Any,
        tensors: Sequence[Tensor],
    ) -> _Graph | None:
        """None: it cannot be recorded, and nothing has changed."""
        inputs = [torch.empty_like(t, device=device) for t in tensors]
        source = iter(inputs)
        recording = Recording(device, 2 * room + 1024)
        try:
            with staged(recording):
                outputs = graph.record(lambda: self._function(*_rebuilt(batch, source)))
        except Exception as error:
            self.refused = f"{type(error).__name__}: {error}"
            warnings.warn(
                f"hotbed.graphed: the step cannot become a CUDA graph and runs as ever. {self.refused}",
                stacklevel=4,
            )
            self._optimizer.zero_grad(set_to_none=True)
            self.forget()
            return None
        recording.fill()
        rows = [(t, t.device_rows, _planes(t.device_rows), t.generation)
                for t in recording.tables.values()]  # fmt: skip
        del self._rehearsed[layout]
        found = self._graphs[layout] = _Graph(graph, recording, inputs, outputs, rows)
        return found

    def _renumbered(self, known: _Graph) -> bool:
        """Gives a recorded step its numbers; False: it is not the step to come any more."""
        if not known.holds():
            return False
        for index in range(len(self._optimizer.param_groups)):
            self._optimizer.numbers_of_step(index)
        return all(renumber() for renumber in known.recording.before)

    def _replay(self, known: _Graph, tensors: Sequence[Tensor]) -> Any:
        with torch.no_grad():
            for there, tensor in zip(known.inputs, tensors, strict=True):
                there.copy_(tensor, non_blocking=True)
            known.graph.replay()
            for action in known.recording.after:
                action()
        return _rebuilt(known.outputs, iter(_copies(known.outputs)))


def _planes(rows: Any) -> tuple[Tensor, ...]:
    return rows.weights, *rows.states


def _layout(part: Any, tensors: list[Tensor]) -> Any:
    """What two batches have in common that one graph serves; collects the tensors on the way.

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


def _rebuilt(part: Any, tensors: Any) -> Any:
    """`part` with other tensors, in the order of `_layout`."""
    if isinstance(part, Tensor):
        return next(tensors)
    if isinstance(part, Jagged):
        values, offsets, weights = _rebuilt((part.values, part.offsets, part.weights), tensors)
        return Jagged(values, offsets, weights=weights)
    if isinstance(part, dict):
        return {name: _rebuilt(one, tensors) for name, one in part.items()}
    if isinstance(part, (list, tuple)):
        made = [_rebuilt(one, tensors) for one in part]
        return type(part)(*made) if hasattr(part, "_fields") else type(part)(made)
    return part


def _copies(outputs: Any) -> list[Tensor]:
    """Of what the next replay overwrites."""
    tensors: list[Tensor] = []
    _layout(outputs, tensors)
    return [tensor.detach().clone() for tensor in tensors]
