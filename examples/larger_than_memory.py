"""The same training within 64 MB for all tables and optimizer states; the other rows lie on disk.

python examples/larger_than_memory.py clicks.tsv rows/
"""

import sys

import torch

import hotbed as hb


def main(log: str, folder: str, host: str = "64MB") -> None:
    torch.manual_seed(0)
    storage = hb.Storage(host=host, ssd=folder, reset=True)
    tables = [hb.Table(f"C{i}", dim=16) for i in range(1, 27)]
    model = hb.models.DLRM(tables, dim=16, storage=storage)
    optimizer = hb.optim.Adam(model.parameters(), lr=1e-3)
    loader = hb.data.CriteoLog(log, batch_size=512)
    for number, batch in enumerate(hb.lookahead(loader, model)):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 100 == 0:
            stats = model.embeddings.stats()
            print(
                f"step {number}: loss {float(loss.detach()):.4f}, {model.embeddings.count():,} rows, "
                f"{stats['hit_rate']:.0%} found in memory"
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
