"""Draws the curve of the scenario `tiers`: python -m benchmarks.draw RESULT.json PICTURE

Writes PICTURE.png and PICTURE.svg. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

AHEAD, NONE, BOUND = "#d9480f", "#868e96", "#1c7ed6"


def draw(result: dict[str, Any], picture: Path) -> None:
    """`result`: what ``python -m benchmarks tiers --json`` wrote."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams.update({"svg.hashsalt": "hotbed", "font.size": 11})
    ratios, figures = result["ratios"], result["figures"]
    shares = [name for name in ratios if name.removesuffix("%").isdigit()]
    x = [float(name.rstrip("%")) for name in shares]

    def curve(values: dict[str, float], ending: str) -> list[float]:
        return [100 * values[name + ending] for name in shares]

    figure, axes = plt.subplots(figsize=(7.5, 4.5))
    axes.plot(
        x, curve(figures, ": bound"), "--", color=BOUND, label="bound with look-ahead's reads"
    )
    axes.plot(x, curve(ratios, ""), "o-", color=AHEAD, label="with look-ahead")
    axes.plot(x, curve(ratios, "/no look-ahead"), "s-", color=NONE, label="without")
    axes.set_xscale("log")
    axes.set_xticks(x, shares)
    axes.minorticks_off()
    axes.invert_xaxis()
    axes.set_ylim(0, 110)
    axes.set_xlabel("memory, of what all rows and states take")
    axes.set_ylabel("rows/s, % of all in memory")
    size = figures["bytes of rows and states"] / 1e9
    hardware = result["hardware"]
    axes.set_title(
        f"DLRM step, {size:.0f} GB of tables, Adagrad; {hardware['cores']} cores", fontsize=11
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(picture.with_suffix(".png"), dpi=130, metadata={"Software": None})
    figure.savefig(picture.with_suffix(".svg"), metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.draw", description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("picture", type=Path, help="without an ending")
    arguments = parser.parse_args()
    draw(json.loads(arguments.result.read_text()), arguments.picture)


if __name__ == "__main__":
    main()
