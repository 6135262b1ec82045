"""A DLRM over 26 tables whose ids are the raw hashes of a click log.

    python examples/dlrm.py clicks.tsv

Without a log of your own: python -c "from hotbed.data import write_criteo_tsv;
write_criteo_tsv('clicks.tsv', rows=100_000, seed=0)"
"""

import sys

import torch

import hotbed as hb


class Ranker(torch.nn.Module):
    def __init__(self, names: list[str], dim: int = 16, storage: hb.Storage | None = None) -> None:
        super().__init__()
        tables = [hb.Table(name, dim=dim) for name in names]
        self.embeddings = hb.EmbeddingCollection(tables, storage=storage)
        self.bottom = hb.nn.MLP(13, [64, dim], final_activation="relu")
        self.interaction = hb.nn.DotInteraction()
        self.top = hb.nn.MLP(dim + 27 * 26 // 2, [256, 128, 1])

    def forward(self, batch):
        dense = self.bottom(batch["dense"])
        vectors = self.embeddings({name: batch[name] for name in self.embeddings.features})
        return self.top(self.interaction(dense, vectors)).squeeze(1)


def main(log: str) -> None:
    torch.manual_seed(0)
    model = Ranker(names=[f"C{i}" for i in range(1, 27)])
    optimizer = hb.optim.Adam(model.parameters(), lr=1e-3)
    for number, batch in enumerate(hb.data.CriteoLog(log, batch_size=512)):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 100 == 0:
            print(
                f"step {number}: loss {float(loss.detach()):.4f}, {model.embeddings.count():,} rows"
            )


if __name__ == "__main__":
    main(sys.argv[1])
