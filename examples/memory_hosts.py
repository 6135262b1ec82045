"""The DLRM of examples/dlrm.py, whose rows lie in processes of their own: the last ranks train nothing.

torchrun --nproc-per-node 3 examples/memory_hosts.py clicks.tsv 1
"""

import sys

import torch
from dlrm import Ranker

import hotbed as hb


def main(log: str, hosts: str) -> None:
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    is_host = rank >= size - int(hosts)
    model = hb.distribute(Ranker([f"C{i}" for i in range(1, 27)]), memory_host=is_host)
    optimizer = hb.optim.Adam(model.parameters(), lr=1e-3)
    if is_host:
        hb.dist.serve_rows(model, optimizer)  # until the others release it
    else:
        batches = hb.dist.slices(hb.data.CriteoLog(log, batch_size=512))
        result = hb.train.fit(model, batches, optimizer)
        rows = model.embeddings.count()
        hb.dist.release_hosts(model)
        if rank == 0:
            speed = f"{result.samples_per_second:,.0f} a second"
            print(f"{result.rows:,} samples, {speed}, {rows:,} rows on {hosts} memory hosts")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
