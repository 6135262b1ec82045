"""The DLRM of examples/dlrm.py on several processes, in memory or in tiers.

torchrun --nproc-per-node 2 examples/many_processes.py clicks.tsv
torchrun --nproc-per-node 2 examples/many_processes.py clicks.tsv /nvme/hotbed
"""

import sys

import torch
from dlrm import Ranker

import hotbed as hb


def main(log: str, ssd: str | None = None) -> None:
    torch.distributed.init_process_group("gloo")
    first = torch.distributed.get_rank() == 0
    torch.manual_seed(0)
    storage = None if ssd is None else hb.Storage(host="64MB", ssd=ssd)
    model = hb.distribute(Ranker([f"C{i}" for i in range(1, 27)], storage=storage))
    optimizer = hb.optim.Adam(model.parameters(), lr=1e-3)
    batches = hb.dist.slices(hb.data.CriteoLog(log, batch_size=512))
    result = hb.train.fit(model, batches, optimizer)
    rows = model.embeddings.count()  # called by all ranks
    if first:
        print(f"{result.rows:,} samples, {result.samples_per_second:,.0f} a second, {rows:,} rows")
    torch.distributed.destroy_process_group()  # else Gloo's threads may abort the process at its end


if __name__ == "__main__":
    main(*sys.argv[1:])
