"""Draws the pictures of docs/ from the committed results: python -m benchmarks.draw

Writes docs/pictures/steps.svg, docs/pictures/tiers.svg and docs/pictures/simulate.svg. Needs matplotlib.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.report import NOISY_SHARE
from benchmarks.simulate import BESIDE, PHASES, PREDICTED, PUBLISHED

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "pictures"

AHEAD, NONE, BOUND = "#d9480f", "#868e96", "#1c7ed6"
COLOURS = {"hotbed": AHEAD, "fbgemm": BOUND, "torch": NONE}
LABELS = {"hotbed": "Hotbed", "fbgemm": "FBGEMM 1.8", "torch": "torch"}
STEPS = {
    "step-multihot": "26 tables × 64, 10 ids a bag",
    "step-narrow": "26 tables × 16, 1 id a bag",
    "step-ragged": "8 tables × 128, 0 to 40 ids a bag",
}
STACKED = ("#fab005", "#f76707", "#d9480f", "#74c0fc", "#1c7ed6", "#868e96", "#ced4da")
"""Of the phases of a step on many GPUs."""
RULES = {"sgd": "SGD", "rowwise_adagrad": "row-wise\nAdagrad", "adagrad": "Adagrad"}


def training_steps(result: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Multiples of the floor of the training steps, by rule and contender; noisy rows are left out."""
    return {
        (row["config"].split(",")[0], row["name"]): row["times_floor"]
        for row in result["rows"]
        if "update" in row["config"] and row["other_work"] <= NOISY_SHARE
    }


def steps(results: dict[str, dict[str, Any]]) -> Any:
    """Figure of training steps, a panel for each scenario of `results`."""
    plt = _pyplot()
    figure, panels = plt.subplots(1, len(results), figsize=(10, 3.8), sharex=True)
    for axes, (scenario, result) in zip(panels, results.items(), strict=True):
        measured = training_steps(result)
        for at, name in enumerate(COLOURS):
            there = [
                (n, measured[rule, name])
                for n, rule in enumerate(RULES)
                if (rule, name) in measured
            ]
            bars = axes.bar(
                [n + 0.28 * (at - 1) for n, _ in there],
                [value for _, value in there],
                width=0.26,
                color=COLOURS[name],
                label=LABELS[name],
            )
            axes.bar_label(bars, fmt="%.1f", fontsize=7)
        axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
        axes.set_xticks(range(len(RULES)), list(RULES.values()))
        axes.set_title(STEPS[scenario], fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("training step, × floor (less is better)")
    panels[0].legend(frameon=False, loc="upper left")
    figure.tight_layout()
    return figure


def tiers(result: dict[str, Any]) -> Any:
    """Figure of the speed within a share of the memory, of the scenario `tiers`."""
    plt = _pyplot()
    ratios, figures = result["ratios"], result["figures"]
    shares = [name for name in ratios if name.removesuffix("%").isdigit()]
    x = [float(name.rstrip("%")) for name in shares]

    def curve(values: dict[str, float], ending: str) -> list[float]:
        return [100 * values[name + ending] for name in shares]

    figure, axes = plt.subplots(figsize=(7.5, 4.2))
    bound = curve(figures, ": bound")
    axes.plot(x, bound, "--", color=BOUND, label="bound with look-ahead's reads")
    axes.plot(x, curve(ratios, ""), "o-", color=AHEAD, label="with look-ahead")
    axes.plot(x, curve(ratios, "/no look-ahead"), "s-", color=NONE, label="without")
    axes.set_xscale("log")
    axes.set_xticks(x, shares)
    axes.minorticks_off()
    axes.invert_xaxis()
    axes.set_ylim(0, 112)
    axes.set_xlabel("memory, of what all rows and states take")
    axes.set_ylabel("rows a second, % of all in memory")
    size = figures["bytes of rows and states"] / 1e9
    cores = result["hardware"]["cores"]
    axes.set_title(f"DLRM step, {size:.0f} GB of tables, Adagrad; {cores} cores", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower left")
    figure.tight_layout()
    return figure


def simulate(result: dict[str, Any]) -> Any:
    """Figure of predicted samples a second and phases by the number of GPUs, of the scenario `simulate`."""
    plt = _pyplot()
    figure, (speed, parts) = plt.subplots(1, 2, figsize=(10, 4.2))
    of_networks = {
        title.removeprefix(f"{PREDICTED}, "): lines
        for title, lines in result["tables"].items()
        if title.startswith(PREDICTED)
    }
    first = next(iter(of_networks))
    for (network, lines), colour in zip(of_networks.items(), (AHEAD, BOUND), strict=False):
        points = [line["GPUs"] for line in lines], [line["M samples/s"] for line in lines]
        speed.plot(*points, "o-", color=colour, label=f"{network}, predicted")
    gpus = [line["GPUs"] for line in of_networks[first]]
    ideal = [of_networks[first][0]["M samples/s"] * n / gpus[0] for n in gpus]
    speed.plot(
        gpus, ideal, ":", color="black", linewidth=0.8, label=f"were all as fast as {gpus[0]}"
    )
    if BESIDE in result["tables"]:
        published = [samples for _, samples in PUBLISHED.values()]
        speed.plot([*PUBLISHED], published, "x", color=NONE, label="HugeCTR, MLPerf's batches")
    speed.set_xscale("log", base=2)
    speed.set_yscale("log")
    speed.set_xticks(gpus, [f"{n:,}" for n in gpus], fontsize=8)
    speed.set_xlabel("H100 GPUs")
    speed.set_ylabel("million samples a second")
    speed.grid(alpha=0.3)
    speed.legend(frameon=False, loc="upper left", fontsize=8)
    _stack(parts, result["tables"][f"{PHASES}, {first}"])
    parts.set_xlabel(f"H100 GPUs, {first}")
    figure.suptitle("A training step of DLRM-DCNv2: predicted, not measured", fontsize=11)
    figure.tight_layout()
    return figure


def _stack(axes: Any, lines: list[dict[str, Any]]) -> None:
    """Draw bars of the phases, one upon the other."""
    names = [name for name in lines[0] if name != "GPUs"]
    below = [0.0] * len(lines)
    for name, colour in zip(names, STACKED, strict=True):
        heights = [line[name] for line in lines]
        axes.bar(range(len(lines)), heights, bottom=below, color=colour, label=name, width=0.75)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    axes.set_xticks(range(len(lines)), [f"{line['GPUs']:,}" for line in lines], fontsize=8)
    axes.set_ylabel("ms of a step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", fontsize=8)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams.update({"svg.hashsalt": "hotbed", "font.size": 10, "svg.fonttype": "none"})
    return plt


def _result(scenario: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{scenario}.json").read_text())
    return result


def sources(*scenarios: str) -> str:
    """Return the runs that a picture shows, which it keeps as its description."""
    runs = {name: _result(name) for name in scenarios}
    return "; ".join(f"{name} {run['date']} {run['commit']}" for name, run in runs.items())


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    figures = {
        "steps": (steps({name: _result(name) for name in STEPS}), sources(*STEPS)),
        "tiers": (tiers(_result("tiers")), sources("tiers")),
        "simulate": (simulate(_result("simulate")), sources("simulate")),
    }
    for name, (figure, runs) in figures.items():
        figure.savefig(
            PICTURES / f"{name}.svg",
            metadata={"Date": None, "Description": runs},
            facecolor="white",
        )


if __name__ == "__main__":
    main()
