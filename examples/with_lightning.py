"""Lightning trains the model: one optimizer for tables and dense layers, and a callback that saves.

pip install pytorch-lightning
python examples/with_lightning.py clicks.tsv runs/lightning
"""

import sys

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

import hotbed as hb


class Clicks(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = hb.models.DeepFM(hb.data.CATEGORIES, dim=8, seed=0)

    def training_step(self, batch, number):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            self.model(batch), batch["label"]
        )
        if number % 100 == 0:
            print(f"step {number}: loss {float(loss.detach()):.4f}")
        return loss

    def configure_optimizers(self):
        return hb.optim.Adam(self.model.parameters(), lr=1e-3)


class Checkpoints(pl.Callback):
    """Lightning's own checkpoints would gather all rows in one file; these stream them."""

    def __init__(self, folder: str, every: int = 100) -> None:
        self.folder, self.every = folder, every

    def on_fit_start(self, trainer, module) -> None:
        if hb.checkpoint.list(self.folder):
            hb.load(self.folder, module.model, trainer.optimizers[0])

    def on_train_batch_end(self, trainer, module, outputs, batch, number) -> None:
        if trainer.global_step % self.every == 0:
            hb.save(
                self.folder, module.model, trainer.optimizers[0], step=trainer.global_step, keep=2
            )


def main(log: str, folder: str) -> None:
    torch.manual_seed(0)
    loader = DataLoader(hb.data.CriteoLog(log, batch_size=512), batch_size=None)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[Checkpoints(folder)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Clicks(), loader)


if __name__ == "__main__":
    main(*sys.argv[1:])
