"""A DeepFM of deepctr-torch, as that library has it, with tables larger than the memory that they get.

pip install deepctr-torch --no-deps && pip install requests pandas scikit-learn tensorboard tqdm
python examples/converted_deepctr.py rows/ [STEPS]
"""

import sys

import torch
from deepctr_torch.inputs import DenseFeat, SparseFeat
from deepctr_torch.models import DeepFM

import hotbed as hb

ROWS, FIELDS, SIZE = 200_000, 4, 256


def batches(steps: int):
    """What deepctr-torch's models take: one matrix of ids and numbers, side by side."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        ids = (torch.rand(SIZE, FIELDS, generator=draw) ** 4 * ROWS).long()
        label = (ids[:, 0] % 2).float()
        yield torch.cat([ids.float(), torch.rand(SIZE, 1, generator=draw)], 1), label


def main(folder: str, steps: int = 200, host: str = "24MB") -> None:
    columns = [SparseFeat(f"C{i}", ROWS, embedding_dim=16) for i in range(FIELDS)]
    columns.append(DenseFeat("I1", 1))
    model = DeepFM(columns, columns, l2_reg_embedding=0, l2_reg_linear=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    sample, _ = next(batches(1))
    storage = hb.Storage(host=host, ssd=folder, reset=True)
    conversion = hb.convert(model, storage=storage, sample=sample)
    optimizer = hb.optim.convert(optimizer, untouched="lazy")
    print(conversion)

    for number, (x, label) in enumerate(batches(steps)):
        loss = torch.nn.functional.binary_cross_entropy(model(x).squeeze(1), label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number in (0, steps - 1):
            print(f"step {number}: loss {float(loss.detach()):.4f}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
