"""`python -m benchmarks SCENARIO [--json OUT] [--quick] [the scenario's own options]`"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

SCENARIOS = {
    "step": "one training step over 26 tables of 1,000,000 x 64, one id a bag",
    "step-multihot": "the same with ten ids a bag",
    "step-narrow": "the step over tables of 1,000,000 x 16, one id a bag",
    "step-ragged": "the step over 8 tables of 400,000 x 128, 0 to 40 ids a bag",
    "dynamic": "the same step with static and with dynamic tables",
    "index": "finds and inserts in a key index of 40 M keys",
    "resolve": "ids to slots in a pool that holds part of the rows, on one core",
    "eviction": "repeat misses against LRU, LFU and Belady's rule",
    "ssd": "reads and write-backs of rows on SSD, against RocksDB and LMDB",
    "train": "a DLRM on the Criteo log, against a plain torch twin",
    "models": "every click model on the Criteo log, against plain torch twins",
    "capacity": "NVIDIA's synthetic model small, larger than memory, in 6 GB (--dry-run: of 1 TB)",
    "tiers": "a DLRM step with 100 to 5 % of its 13 GB in memory, the rest on disk",
    "tiers-small": "two tables of 54 MB at batch 256 and 1,024, a half and a quarter in memory",
    "tiers-ranks": "with a quarter of the rows in memory: look-ahead on one process and on two ranks",
    "checkpoint": "saving and loading 4.3 GB of rows, within 1 GB and in memory, against the disk",
    "background": "saves in the background against those that a training waits for",
    "deltas": "checkpoints of what has changed against whole ones, and what a step takes to know it",
    "linked": "saves that share files with the SSD, against writing what was dirty",
    "serve": "a DLRM of 10 M rows that answers over HTTP, against torch and FastAPI",
    "serve-memory": "one worker and four; rows four times the memory of the server",
    "serve-bits": "AUC of the same models with rows in few bits, and sizes of bundles",
    "serve-follow": "how soon a server answers with what a training has learned",
    "merge": "a whole checkpoint and 20 of changes made into one, against the disk",
    "synthetic": "NVIDIA's synthetic models: tiny at batch 65,536 with Adagrad",
    "quantized": "pooled vectors of a bundle's rows, float32, int8 and int4, against torch and FBGEMM",
    "gpu": "a CUDA device: roof, interaction, layers, lookups, training with tables on it",
    "busy": "`hotbed train` on a quiet machine and beside two busy processes, by how threads wait",
    "exchange": "one training step of tables that two processes share, against TorchRec and DDP",
    "exchange-bags": "the same with 1 to 50 ids a bag, tables cut in three ways, against TorchRec",
    "codecs": "rows and gradients as bfloat16 and int8, by the speed of the link; AUC of 20 seeds",
    "overlap": "rows of the next batch that travel while one is trained on, by the speed of the link",
    "scale": "samples a second of a DLRM on 1, 2 and 4 processes, against DDP (--link: its network)",
    "scale-tables": "a step over 100 to 800 small tables, in one process and on two ranks",
    "machines": "two machines of two ranks over a slow link: one level of exchange, and two",
    "memory-hosts": "a rank whose rows another process keeps, against two ranks and one process",
    "plan": "plans of NVIDIA's colossal (2,002 tables, 22 TiB) for 1,024 ranks",
    "measured-plan": "four models on two ranks by every strategy; predicted beside measured steps",
    "simulate": "a step on 8 to 1,024 GPUs, predicted from published figures; checked on this machine",
    "layers": "models of one's own on hb.Embedding, beside nn.Embedding and the best of its optimizers",
    "converted": "a DeepFM of deepctr-torch (make foreign), as it is and converted",
    "reader": "rows a second from Parquet and CSV files to batches, against pyarrow and pandas",
    "many-tables": "memory of 1 to 2,000 small tables, and the first step beside later ones",
    "import": "what `import hotbed` adds to `import torch`",
}
# `import` is a keyword, so its module has another name.
MODULES = {name: name.replace("-", "_") for name in SCENARIOS} | {"import": "import_time"}

EVERY_S = 60.0
"""A thread that sleeps in between takes nothing from what is measured."""


@contextlib.contextmanager
def alive(console: Console) -> Iterator[Callable[[str], None]]:
    """What to call with what is going on. Where nobody watches, a line a minute says that it is."""
    if console.is_terminal:
        with console.status("measuring the machine") as status:
            yield lambda text: status.update(f"{text} ...")
        return
    began, now, ended = time.monotonic(), ["measuring the machine"], threading.Event()

    def tell() -> None:
        while not ended.wait(EVERY_S):
            minutes = (time.monotonic() - began) / 60
            print(f"after {minutes:.0f} min: {now[0]} ...", file=sys.stderr, flush=True)

    threading.Thread(target=tell, daemon=True).start()
    try:
        yield lambda text: now.__setitem__(0, text)
    finally:
        ended.set()


def main() -> None:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", type=Path, metavar="OUT", help="also write the result here")
    shared.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[shared],
        epilog="scenarios (python -m benchmarks SCENARIO --help tells more):\n"
        + "\n".join(f"  {k:14} {v}" for k, v in SCENARIOS.items()),
    )
    parser.add_argument("scenario", choices=SCENARIOS, metavar="SCENARIO")
    words = sys.argv[1:]
    is_asked = bool({"-h", "--help"} & set(words)) and any(word in SCENARIOS for word in words)
    if is_asked:
        words = [word for word in words if word not in ("-h", "--help")]
    arguments, rest = parser.parse_known_args(words)
    module = importlib.import_module("benchmarks." + MODULES[arguments.scenario])
    own = argparse.ArgumentParser(
        prog=f"python -m benchmarks {arguments.scenario}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=module.__doc__,
        parents=[shared],
        epilog=getattr(module, "HELP", None),
    )
    if hasattr(module, "add_options"):
        module.add_options(own)
    options = vars(own.parse_args(["--help"] if is_asked else rest))
    for common in ("json", "quick"):
        del options[common]
    if arguments.json and "save" in inspect.signature(module.run).parameters:
        options["save"] = lambda report: report.write(arguments.json)

    console = Console()
    with alive(console) as progress:
        report = module.run(quick=arguments.quick, progress=progress, **options)
    report.show(console)
    if arguments.json:
        report.write(arguments.json)
    if report.failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
