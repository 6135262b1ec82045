"""Train a click model on the workers of Ray Train, its tables shared between them.

pip install "ray[train]"
python examples/with_ray.py run/ [WORKERS]
"""

import sys
from pathlib import Path

import ray
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

import hotbed as hb


def train(config: dict[str, str]) -> None:
    """What each worker does. Ray has made the process group."""
    model = hb.distribute(hb.models.DLRM(hb.data.CATEGORIES, seed=0))
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.02)
    loader = hb.data.synthetic_clicks(rows=20_480)
    for number, batch in enumerate(hb.dist.slices(loader)):
        logits = model(batch)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch["label"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 10 == 0:  # for Ray's records
            ray.train.report({"step": number, "loss": float(loss.detach())})
    hb.save(config["folder"], model, optimizer, step=number + 1)  # all workers call it


def main(folder: str, workers: int = 2) -> None:
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(Path(folder).resolve())},  # that all workers see
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workers),
    )
    trainer.fit()
    print(f"The rows of step {hb.checkpoint.list(folder)[-1].step} are in {folder}.")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
