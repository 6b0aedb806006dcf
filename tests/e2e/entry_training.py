"""The one training that every script of `entries.py` starts in its own way; it lies beside the script as training.py.

It leaves what must be the same however it was started: a line a step and rank, metrics.csv, checkpoints, result.json.
"""

import json
import os
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

FLAVOUR = "lightning.pytorch"
pl = import_module(FLAVOUR)
GATED = Path(__file__).with_name("gated").exists()
"""Whether somebody wants to plan faults before the first step."""


class Numbers(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(8, generator=torch.Generator().manual_seed(index)), index


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(Numbers(), batch_size=4, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Numbers(), batch_size=8)

    test_dataloader = predict_dataloader = val_dataloader


class Model(pl.LightningModule):
    def __init__(self, out: str = "out", lr: float = 0.05) -> None:
        super().__init__()
        self.out, self.lr = out, lr
        self.layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        self.means: list[float] = []

    def on_train_start(self) -> None:
        armed = Path(self.out, "armed")
        if GATED and not armed.exists():
            Path(self.out, "waiting").touch()
            while not armed.exists():
                time.sleep(0.005)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, ids = batch
        loss = self.layer(x).pow(2).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        with open(f"{self.out}/steps.r{self.global_rank}.jsonl", "a") as file:
            line = {"step": self.global_step, "ids": ids.tolist(), "loss": loss.item().hex(), "lr": self.lr}
            file.write(json.dumps(line) + "\n")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.layer(batch[0]).pow(2).mean(), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        mean = self.layer(batch[0]).mean()
        self.means.append(mean.item())
        self.log("test", mean, sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def options(out: str) -> dict[str, Any]:
    os.makedirs(out, exist_ok=True)
    callbacks, loggers = import_module(f"{FLAVOUR}.callbacks"), import_module(f"{FLAVOUR}.loggers")
    return {
        "accelerator": "cpu",
        "devices": 2,
        "max_epochs": 2,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": out,
        "logger": loggers.CSVLogger(out, name="logs", version=0),
        "callbacks": [callbacks.ModelCheckpoint(dirpath=f"{out}/checkpoints", monitor="val", save_last=True)],
    }


def report(trainer: Any, model: Any, out: str, **more: Any) -> None:
    if trainer.global_rank != 0:
        return
    result = {
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "weights": [value.double().sum().item().hex() for value in model.state_dict().values()],
        "metrics": {name: value.item().hex() for name, value in trainer.callback_metrics.items()},
        "lr": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "best": os.path.basename(trainer.checkpoint_callback.best_model_path),
        **more,
    }
    with open(f"{out}/result.json", "w") as file:
        json.dump(result, file)
    print("END", len(getattr(trainer.strategy, "recoveries", ())))


def train(out: str = "out", **more: Any) -> None:
    pl.seed_everything(7, verbose=False)
    trainer, model = pl.Trainer(**options(out), **more), Model(out)
    trainer.fit(model, datamodule=Data())
    report(trainer, model, out)
