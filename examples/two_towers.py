"""Retrieval: a tower for users and one for items, trained on what users chose; then best items of users.

python examples/two_towers.py [STEPS]
"""

import sys

import torch

import hotbed as hb

USERS, ITEMS, TASTES = 2000, 1000, 20


def choices(steps: int, seed: int, size: int = 256):
    """Batches of users and what they chose: mostly items of their own taste, and popular ones."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        user = torch.randint(USERS, (size,), generator=draw)
        popular = torch.rand(size, generator=draw) ** 2 * (ITEMS // TASTES)
        taste = torch.where(torch.rand(size, generator=draw) < 0.9, user % TASTES, 0)
        item = popular.long() * TASTES + taste
        yield {"user": user, "item": item, "kind": item % 7, "label": torch.ones(size)}


def main(steps: int = 400) -> None:
    torch.manual_seed(0)
    tables = [hb.Table(name, 32, init=hb.init.Normal(std=0.1)) for name in ("user", "item", "kind")]
    model = hb.models.TwoTower(tables, dim=32, user=["user"], item=["item", "kind"], out=32, seed=0)
    optimizer = hb.optim.Adam(model.parameters(), lr=3e-3)
    for number, batch in enumerate(choices(steps, seed=0)):
        loss = model.loss(
            model(batch), batch["label"]
        )  # the other items of the batch are negatives
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number in (0, steps - 1):
            print(f"step {number}: loss {float(loss.detach()):.4f}")

    catalogue = torch.arange(ITEMS)
    items = [{"item": catalogue, "kind": catalogue % 7}]
    index = hb.models.ItemIndex.of(model, items)
    quality = hb.train.evaluate_retrieval(model, choices(20, seed=1), index, k=(10, 50))
    print(f"recall at 50: {quality.recall[50]:.3f}, NDCG at 50: {quality.ndcg[50]:.3f}")
    model.eval()
    best = index.search(model.user_vectors({"user": torch.tensor([3, 4])}), k=5)
    print("best items of users 3 and 4:", best.ids.tolist())
    index.save("items.safetensors")  # ids and vectors, for whoever answers requests


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
