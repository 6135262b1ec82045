"""The dense kernels at DLRM's shapes, beside torch's operations, eager and compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_roof import ITERATIONS, PRECISIONS, Roof, timed
from benchmarks.gpu_scenarios import Run

BATCH, QUICK_BATCH = 65536, 2048
FEATURES, DIM = 26, 128
MLPS = {
    "bottom": (13, (512, 256, 128)),
    "top": (479, (1024, 1024, 512, 256, 1)),
    "top's first layer": (479, (1024,)),
}
COMPILED = ("tf32", "bfloat16")
"""Precisions in which torch.compile takes part: compiling takes its time."""

Contenders = dict[str, Callable[..., Any]]


def interaction(run: Run) -> None:
    """Forward, and forward + backward, of 27 x 128."""
    from hotbed.nn import DotInteraction

    batch, count = QUICK_BATCH if run.report.quick else BATCH, FEATURES + 1
    roof = run.roof
    i, j = torch.tril_indices(count, count, -1, device="cuda")

    def plain(dense: Tensor, vectors: Tensor) -> Tensor:
        joined = torch.cat([dense.unsqueeze(1), vectors], 1)
        products = torch.bmm(joined, joined.transpose(1, 2))
        return torch.cat([dense, products[:, i, j]], 1)

    layer = DotInteraction()
    for precision, (dtype, setting) in PRECISIONS.items():
        run.doing(f"interaction, {precision}")
        torch.set_float32_matmul_precision(setting)
        dense = torch.randn(batch, DIM, device="cuda").to(dtype).requires_grad_()
        vectors = torch.randn(batch, FEATURES, DIM, device="cuda").to(dtype).requires_grad_()
        functions: Contenders = {"hotbed": layer, "torch": plain}
        _add_compiled(run, "interaction", precision, functions, plain, [dense, vectors])
        pairs = count * (count - 1) // 2
        read = count * DIM
        forward = batch * (read + DIM + pairs) * dtype.itemsize
        backward = batch * (DIM + pairs + 2 * read) * dtype.itemsize
        flops = 2 * batch * pairs * DIM
        config = f"interaction, {precision}, {batch:,} x {count} x {DIM}"
        _contest(
            run,
            config,
            functions,
            [dense, vectors],
            roof.floor_ms(forward, flops, precision),
            roof.floor_ms(forward, flops, precision)
            + roof.floor_ms(backward, 2 * flops, precision),
            (forward, forward + backward),
        )


def mlp(run: Run) -> None:
    """Forward, and forward + backward, of DLRM's MLPs."""
    from hotbed.nn import MLP

    batch = QUICK_BATCH if run.report.quick else BATCH
    for name, (inputs, widths) in MLPS.items():
        final = None if name == "top" else "relu"
        for precision, (dtype, setting) in PRECISIONS.items():
            run.doing(f"mlp, {name}, {precision}")
            torch.set_float32_matmul_precision(setting)
            layer = MLP(inputs, widths, final_activation=final).cuda().to(dtype)
            plain = _sequence(layer, final)
            x = torch.randn(batch, inputs, device="cuda").to(dtype)
            if name != "bottom":  # whose input nobody needs a gradient of
                x.requires_grad_()
            functions: Contenders = {"hotbed": layer, "torch": plain}
            _add_compiled(run, f"mlp {name}", precision, functions, copy.deepcopy(plain), [x])
            parameters = {n: list(f.parameters()) for n, f in functions.items()}  # type: ignore[attr-defined]
            floors, moved = _mlp_floors(
                run.roof, batch, (inputs, *widths), precision, x.requires_grad
            )
            shape = "-".join(map(str, (inputs, *widths)))
            _contest(
                run,
                f"mlp {name}, {precision}, {batch:,} x {shape}",
                functions,
                [x] if x.requires_grad else [],
                *floors,
                moved,
                arguments=[x],
                parameters=parameters,
            )


def _sequence(layer: Any, final: str | None) -> nn.Sequential:
    """`layer`: a `hotbed.nn.MLP`."""
    parts: list[nn.Module] = []
    for linear in layer.layers:
        parts += [copy.deepcopy(linear), nn.ReLU()]
    return nn.Sequential(*(parts if final else parts[:-1]))


def _mlp_floors(
    roof: Roof, batch: int, widths: Sequence[int], precision: str, to_input: bool
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Floors of the forward and of both, and the bytes that they move, layer by layer."""
    size = PRECISIONS[precision][0].itemsize
    forward = both = 0.0
    moved_forward = moved_both = 0.0
    for layer, (k, n) in enumerate(zip(widths[:-1], widths[1:], strict=True)):
        flops = 2.0 * batch * k * n
        x, weight, out = size * batch * k, size * k * n, size * batch * n
        forward += roof.floor_ms(x + weight + out, flops, precision)
        moved_forward += x + weight + out
        both += roof.floor_ms(x + out + weight, flops, precision)  # the weight's gradient
        moved_both += x + out + weight
        if layer or to_input:
            both += roof.floor_ms(out + weight + x, flops, precision)
            moved_both += out + weight + x
    return (forward, forward + both), (moved_forward, moved_forward + moved_both)


def _add_compiled(
    run: Run, what: str, precision: str, functions: Contenders, plain: Any, arguments: list[Tensor]
) -> None:
    if precision in COMPILED:
        compiled = run.compiled(
            f"{what}, {precision}", plain, lambda made: made(*arguments).sum().backward()
        )
        if compiled is not None:
            functions["torch compiled"] = compiled


def _contest(
    run: Run,
    config: str,
    functions: Contenders,
    inputs: list[Tensor],
    forward_floor: float,
    both_floor: float,
    moved: tuple[float, float],
    *,
    arguments: list[Tensor] | None = None,
    parameters: dict[str, list[Tensor]] | None = None,
) -> None:
    arguments = inputs if arguments is None else arguments
    with torch.no_grad():
        gradient = torch.randn_like(functions["torch"](*arguments))

    def forward(function: Any) -> Callable[[], object]:
        def run() -> object:
            with torch.no_grad():
                return function(*arguments)

        return run

    def both(name: str, function: Any) -> Callable[[], object]:
        wanted = [*inputs, *(parameters or {}).get(name, [])]
        return lambda: torch.autograd.grad(function(*arguments), wanted, gradient)

    works: list[tuple[str, float, float, Contenders]] = [
        ("forward", forward_floor, moved[0], {n: forward(f) for n, f in functions.items()}),
        (
            "forward+backward",
            both_floor,
            moved[1],
            {n: both(n, f) for n, f in functions.items()},
        ),
    ]
    for what, floor, nbytes, contenders in works:
        timings = timed(contenders, 5 if run.report.quick else ITERATIONS)
        for name, timing in timings.items():
            run.report.add(name, f"{config}, {what}", timing, nbytes, floor_ms=floor)
        for name, timing in timings.items():
            if name != "hotbed":
                ratio = timing.median / timings["hotbed"].median
                run.report.ratios[f"{name}/{config}, {what}"] = ratio
