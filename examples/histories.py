"""DIN: will a user click on this item, given those they looked at before?

python examples/histories.py [STEPS]
"""

import sys

import torch

import hotbed as hb

ITEMS, KINDS, LENGTH = 1000, 25, 10


def visits(steps: int, seed: int, size: int = 512):
    """Batches of a candidate and a history of 1 to 10 items; who saw its kind before is likely to click."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        item = torch.randint(ITEMS, (size,), generator=draw)
        items = torch.randint(ITEMS, (size, LENGTH), generator=draw)
        there = torch.arange(LENGTH) < torch.randint(1, LENGTH + 1, (size, 1), generator=draw)
        alike = ((items % KINDS == item.unsqueeze(1) % KINDS) & there).any(1)
        chance = torch.where(alike, 0.9, 0.1)
        yield {
            "item": item,
            "kind": item % KINDS,
            "items": torch.where(there, items, -1),  # -1 fills up
            "kinds": torch.where(there, items % KINDS, -1),
            "label": (torch.rand(size, generator=draw) < chance).float(),
        }


def main(steps: int = 600) -> None:
    torch.manual_seed(0)
    first = hb.init.Normal(std=0.1)
    tables = [
        hb.Table(name, 8, combiner=None, padding_idx=-1, init=first) for name in ("item", "kind")
    ]
    model = hb.models.DIN(
        tables,
        dim=8,
        target=["item", "kind"],
        history=["items", "kinds"],
        features={"item": "item", "items": "item", "kind": "kind", "kinds": "kind"},
        seed=0,
    )
    optimizer = hb.optim.Adam(model.parameters(), lr=5e-3)
    for number, batch in enumerate(visits(steps, seed=0)):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number in (0, steps - 1):
            print(f"step {number}: loss {float(loss.detach()):.4f}")
    print(f"AUC {hb.train.evaluate(model, visits(20, seed=1)).auc:.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
