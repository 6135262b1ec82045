"""MMoE: two labels of a visit, a click and a purchase, from experts that they share.

python examples/several_labels.py [STEPS]
"""

import sys

import torch

import hotbed as hb

USERS, ITEMS = 500, 300


def visits(steps: int, seed: int, size: int = 256):
    """Batches with labels (B, 2); whether somebody bought is known of clicks only, else it is NaN."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        user = torch.randint(USERS, (size,), generator=draw)
        item = torch.randint(ITEMS, (size,), generator=draw)
        click = 0.1 + 0.4 * (user % 3 == 0) + 0.4 * (item % 2 == 0)
        chances = torch.stack([click, 0.1 + 0.5 * (item % 4 == 0)], 1)
        clicked, bought = (torch.rand(size, 2, generator=draw) < chances).float().unbind(1)
        bought = torch.where(clicked > 0, bought, torch.nan)
        yield {"user": user, "item": item, "label": torch.stack([clicked, bought], 1)}


def main(steps: int = 600) -> None:
    torch.manual_seed(0)
    tables = [hb.Table(name, 8, init=hb.init.Normal(std=0.1)) for name in ("user", "item")]
    model = hb.models.MMoE(tables, dim=8, num_dense=0, tasks=2, expert=[32, 16], seed=0)
    optimizer = hb.optim.Adam(model.parameters(), lr=5e-3)
    tasks = [hb.train.Task("click"), hb.train.Task("buy", weight=0.5)]
    for name, figures in hb.train.evaluate(model, visits(20, seed=1), tasks=tasks).tasks.items():
        print(f"before, {name}: loss {figures['logloss']:.4f}, AUC {figures['auc']:.3f}")
    hb.train.fit(model, visits(steps, seed=0), optimizer, tasks=tasks)
    for name, figures in hb.train.evaluate(model, visits(20, seed=1), tasks=tasks).tasks.items():
        print(f"after, {name}: loss {figures['logloss']:.4f}, AUC {figures['auc']:.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
