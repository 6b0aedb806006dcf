"""The script that end-to-end tests train with: a user's script, whose features a JSON value in TINY_CASE chooses.

It notes what each step saw in one line of `steps.r<rank>.jsonl`, as floats in hexadecimal: loss, sample ids, learning
rates, logged metrics. After the call it writes `result.json`.

It trains on the CPU, or where LETO_TEST_DEVICE says "cuda" on one GPU, which all ranks share.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler

from tests.e2e import models
from tests.e2e.data import KINDS, Place, flatten

SHADOW_SECONDS_MAX = 8.0


def chosen_device() -> str:
    """Where the tests of this session train: "cpu" or "cuda"."""
    return os.environ.get("LETO_TEST_DEVICE", "cpu")


@dataclass
class Case:
    """One run; the defaults are a small run that uses most of what is supported."""

    out: str = ""
    device: str = field(default_factory=chosen_device)
    flavour: str = "lightning.pytorch"
    strategy: str = "leto"
    devices: int = 2
    epochs: int = 2
    batches: int = 6
    batch_size: int = 4
    width: int = 16
    num_workers: int = 0
    persistent: bool = False
    augment: bool = False
    sampler: str = "default"
    optimizer: str = "adamw"
    schedulers: list[str] = field(default_factory=lambda: ["cosine_step", "plateau_step", "plateau_epoch"])
    clip: float | None = 0.5
    val_check_interval: float | int = 3
    logger: bool = True
    loggers: list[str] = field(default_factory=lambda: ["csv"])
    hparams: bool = False
    parts: list[str] = field(default_factory=list)
    log_every_n_steps: int = 1
    callbacks: list[str] = field(default_factory=lambda: ["checkpoint", "early_stopping", "lr_monitor"])
    max_steps: int = -1
    slow: float = 0.0
    test_after: bool = False
    fits: int = 1
    log_around: bool = False
    misbehave: str = ""
    rough: bool = False
    model: str = "tiny"
    plugins: list[str] = field(default_factory=list)
    data: str = "map"
    options: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)

    def key(self) -> str:
        """Names the undisturbed run that this one must equal."""
        values = {k: v for k, v in asdict(self).items() if k not in ("out", "slow")}
        values["options"] = {k: v for k, v in self.options.items() if k in ("chunk_bytes", "bucket_cap_mb")}
        return hashlib.sha1(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def wait_for_shadow(case: Case) -> None:
    """On a GPU, where a step takes no time and a process seconds to get ready: let a shadow be there, for some seconds.

    Not where there is none, or where standing still is a hang.
    """
    if case.device == "cpu" or case.options.get("shadows") == 0 or "hang_timeout" in case.options:
        return
    deadline = time.monotonic() + SHADOW_SECONDS_MAX
    changes = {"promoted": False, "shadow_failed": False, "shadow_ready": True}
    while time.monotonic() < deadline:
        with open(f"{case.out}/leto/events.jsonl", "rb") as file:
            names = [json.loads(line)["event"] for line in file if line.endswith(b"\n")]
        if next((changes[name] for name in reversed(names) if name in changes), False):
            return
        time.sleep(0.02)


class Numbers(Dataset):
    """Sample i is a fixed random vector and i; with `augment` noise from the global generators is added."""

    def __init__(self, length: int, augment: bool = False) -> None:
        self.length, self.augment = length, augment

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        if self.augment:
            x = x + 0.1 * torch.randn(8) + 0.1 * random.random()
        return x, index


class LazySampler(Sampler):
    """Draws each index when it is asked for, from Python's generator, which nobody else uses."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        for _ in range(self.length):
            yield random.randrange(self.length)


class EpochSampler(Sampler):
    """Another order each epoch, told by set_epoch; one shard a rank."""

    def __init__(self, length: int, rank: int, world: int) -> None:
        self.length, self.rank, self.world, self.epoch = length, rank, world, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length // self.world

    def __iter__(self) -> Any:
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(100 + self.epoch)).tolist()
        return iter(order[self.rank :: self.world])


def hexadecimal(values: dict[str, Any]) -> dict[str, str]:
    """Metrics as exact text."""
    return {k: float(v).hex() for k, v in sorted(values.items())}


def build(case: Case, pl: Any) -> tuple[Any, Any]:
    """Module and Trainer of a case."""
    from tests.e2e.callback_cases import CALLBACKS, PARTS
    from tests.e2e.logging_cases import LOGGERS

    parts: list[Any] = []

    class Tiny(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            width = case.width
            self.net = torch.nn.Sequential(
                torch.nn.Linear(8, width), torch.nn.BatchNorm1d(width), torch.nn.ReLU(), torch.nn.Dropout(0.1)
            )
            self.head = torch.nn.Linear(width, 1)
            self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
            self.losses: list[float] = []
            self.count = 0
            if case.rough:
                self.penalised = [self.head.weight]
                self.untouched = {"scale": torch.ones(1)}
                self.alias = self.untouched
            if case.hparams:
                self.save_hyperparameters({"width": width, "optimizer": case.optimizer})
                self.example_input_array = torch.ones(2, 8)
            parts.extend(PARTS[name](self) for name in case.parts)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.net(x))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, ids = batch if case.data == "map" else flatten(batch)
            if case.slow and not os.path.exists(f"{case.out}/hurry"):
                wait_for_shadow(case)
                time.sleep(case.slow)
            misbehave(self, "training_step", batch_idx)
            loss = (self.head(self.net(x)) ** 2).mean()
            if case.rough:
                loss = loss + 0.1 * sum(p.pow(2).sum() for p in self.penalised) + 0.01 * batch_idx
            self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
            self.log("largest", x.max(), reduce_fx="max", on_step=False, on_epoch=True, sync_dist=True)
            for part in parts:
                part(self, x)
            self.losses.append(loss.item())
            self.count += 1
            return {"loss": loss, "ids": ids}

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            if case.rough and self.trainer.training:
                self.count += 100
            return batch

        def on_train_start(self) -> None:
            if case.rough:
                self.hook = lambda: self.alias is self.untouched
                self.owner = self.trainer

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            if not case.rough:
                super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
                return
            optimizer_closure()  # as in Lightning's documentation: the closure first, then a step without one
            assert self.hook()
            assert self.owner is self.trainer
            optimizer.step()

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            name = f"val{dataloader_idx or ''}"
            loss = (self.head(self.net(flatten(batch)[0])) ** 2).mean()
            self.log(name, loss, sync_dist=True, add_dataloader_idx=False)
            self.log(f"{name}_batch", loss, on_step=True, on_epoch=False, add_dataloader_idx=False)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test", (self.head(self.net(batch[0])) ** 2).mean(), sync_dist=True)

        def on_fit_start(self) -> None:
            if case.rough and not hasattr(self, "late"):
                self.net.register_buffer("late", torch.zeros(2, device=self.device))
            self.notes = open(f"{case.out}/steps.r{self.global_rank}.jsonl", "ab", buffering=0)  # noqa: SIM115

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            misbehave(self, "on_train_batch_end", batch_idx)
            self.note(
                step=self.global_step,
                epoch=self.current_epoch,
                batch=batch_idx,
                loss=outputs["loss"].item().hex() if outputs and "loss" in outputs else None,
                ids=(batch if case.data == "map" else flatten(batch))[1].tolist(),
                lr=[float(g["lr"]).hex() for o in self.trainer.optimizers for g in o.param_groups],
                weights=digest(self)[:16],
                scaler=self.trainer.precision_plugin.state_dict(),
                count=self.count,
                losses=hashlib.sha1(repr(self.losses).encode()).hexdigest()[:12],
                metrics=hexadecimal(self.trainer.callback_metrics),
            )

        def on_train_epoch_end(self) -> None:
            self.note(epoch_end=self.current_epoch, metrics=hexadecimal(self.trainer.callback_metrics))

        def note(self, **what: Any) -> None:
            self.notes.write((json.dumps(what) + "\n").encode())

        def configure_optimizers(self) -> Any:
            decayed = [self.net[0].weight, self.head.weight]
            others = [p for p in self.parameters() if p.requires_grad and not any(p is d for d in decayed)]
            groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 2e-2}]
            make = {
                "adamw": lambda: torch.optim.AdamW(groups, 1e-2),
                "amsgrad": lambda: torch.optim.Adam(groups, 1e-2, amsgrad=True),
                "sgd": lambda: torch.optim.SGD(groups, 1e-2, momentum=0.9, nesterov=True),
                "rmsprop": lambda: torch.optim.RMSprop(groups, 1e-2),
            }
            optimizer = make[case.optimizer]()
            configs = []
            for name in case.schedulers:
                plateau = {"patience": 0, "factor": 0.9, "mode": "max", "threshold": 10.0}
                if name == "cosine_step":
                    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
                    configs.append({"scheduler": scheduler, "interval": "step"})
                elif name == "step_epoch":
                    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
                    configs.append({"scheduler": scheduler, "interval": "epoch"})
                elif name == "plateau_step":
                    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **plateau)
                    configs.append({"scheduler": scheduler, "monitor": "loss", "interval": "step", "frequency": 2})
                elif name == "plateau_epoch":
                    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **plateau)
                    configs.append({"scheduler": scheduler, "monitor": "loss_epoch", "interval": "epoch"})
            return [optimizer], configs

    def misbehave(module: Any, where: str, batch_idx: int) -> None:
        what, _, rest = case.misbehave.partition("@")
        if not what:
            return
        at, rank, step = rest.split(":")
        if at != where or module.global_rank != int(rank) or module.trainer.global_step != int(step):
            return
        if what == "exception":
            raise ZeroDivisionError("a bug of the user")
        if what == "exit":
            sys.exit(3)
        if what == "poison":
            os.kill(os.getpid(), signal.SIGSEGV)
        if what == "write_parameter":
            with torch.no_grad():
                module.head.bias.add_(1.0)

    callbacks: list[Any] = models.callbacks_of(case, pl)
    if "checkpoint" in case.callbacks:
        callbacks.append(
            pl.callbacks.ModelCheckpoint(
                dirpath=f"{case.out}/checkpoints",
                monitor="val",
                save_top_k=2,
                save_last=True,
                filename="{epoch}-{step}",
            )
        )
    if "checkpoint_steps" in case.callbacks:
        callbacks.append(
            pl.callbacks.ModelCheckpoint(
                dirpath=f"{case.out}/checkpoints-steps", every_n_train_steps=2, save_top_k=-1, filename="at"
            )
        )
    if "checkpoint_newest" in case.callbacks:
        callbacks.append(
            pl.callbacks.ModelCheckpoint(
                dirpath=f"{case.out}/checkpoints-newest", every_n_train_steps=2, save_top_k=1, filename="{step}"
            )
        )
    if "early_stopping" in case.callbacks:
        callbacks.append(pl.callbacks.EarlyStopping("val", patience=50))
    if "stop_early" in case.callbacks:
        callbacks.append(pl.callbacks.EarlyStopping("val", patience=1, min_delta=100.0))
    if "lr_monitor" in case.callbacks and case.logger:
        callbacks.append(pl.callbacks.LearningRateMonitor())
    callbacks += [CALLBACKS[name](pl, case.out) for name in case.callbacks if name in CALLBACKS]
    trainer = pl.Trainer(
        strategy=strategy_of(case, pl),
        **devices_of(case),
        max_epochs=case.epochs,
        max_steps=case.max_steps,
        logger=[LOGGERS[name](pl, case.out) for name in case.loggers] if case.logger else False,
        callbacks=callbacks,
        enable_checkpointing=any(isinstance(c, pl.callbacks.Checkpoint) for c in callbacks),
        log_every_n_steps=case.log_every_n_steps,
        gradient_clip_val=case.clip,
        val_check_interval=case.val_check_interval,
        num_sanity_val_steps=1,
        use_distributed_sampler=case.sampler == "default",
        **{
            "default_root_dir": case.out,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **case.trainer,
        },
        plugins=[models.PLUGINS[name](pl, case.device) for name in case.plugins],
    )
    return models.variant(case, pl, Tiny)(), trainer


def devices_of(case: Case) -> dict[str, Any]:
    """Options of the Trainer: where to train. A GPU computes the same bits each time only if it is told to."""
    if case.device == "cpu":
        return {"accelerator": "cpu", "devices": case.devices}
    return {"accelerator": "gpu", "devices": 1, "deterministic": True}


def strategy_of(case: Case, pl: Any) -> Any:
    """The strategy by name, or as an object where it has options. Only an object takes one GPU for several ranks."""
    options = dict(case.options) if case.strategy == "leto" else {}
    if case.device == "cuda" and case.devices > 1:
        options |= {"parallel_devices": [torch.device("cuda:0")] * case.devices, "process_group_backend": "gloo"}
    if not options:
        return case.strategy
    if case.strategy != "leto":
        assert case.strategy in ("ddp", "ddp_find_unused_parameters_true"), case.strategy
        return pl.strategies.DDPStrategy(find_unused_parameters=case.strategy != "ddp", **options)
    from importlib import import_module  # the fork server has imported one distribution, the case may use the other

    LetoStrategy = import_module(f"leto_strategy.strategy.{case.flavour.split('.')[0]}").LetoStrategy
    return LetoStrategy(**options)


def loaders(case: Case, trainer: Any, pl: Any) -> tuple[Any, Any]:
    """Training and validation loader."""
    if case.data != "map":
        place = Place(trainer.global_rank, case.devices, pl.utilities.CombinedLoader, pl.LightningDataModule)
        return KINDS[case.data].build(place)
    length = case.batches * case.batch_size * case.devices
    dataset = Numbers(length, case.augment)
    sampler: Any = None
    if case.sampler == "random":
        sampler = RandomSampler(dataset, num_samples=case.batches * case.batch_size)
    elif case.sampler == "lazy":
        sampler = LazySampler(case.batches * case.batch_size)
    elif case.sampler == "epoch":
        sampler = EpochSampler(length, trainer.local_rank, case.devices)
    options = {"num_workers": case.num_workers, "persistent_workers": case.persistent and case.num_workers > 0}
    training = DataLoader(dataset, case.batch_size, shuffle=sampler is None, sampler=sampler, **options)
    return training, DataLoader(Numbers(16), 4)


def data_module(case: Case, trainer: Any, pl: Any) -> Any:
    """The loaders in a datamodule that has hyper-parameters of its own."""

    class Data(pl.LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"batch_size": case.batch_size})

        def train_dataloader(self) -> Any:
            return loaders(case, trainer, pl)[0]

        def val_dataloader(self) -> Any:
            return loaders(case, trainer, pl)[1]

    return Data()


def digest(module: Any) -> str:
    """Hash of all weights and buffers."""
    state = module.state_dict()
    tensors = (state[k].contiguous().reshape(-1).view(torch.uint8) for k in sorted(state))
    return hashlib.sha1(b"".join(tensor.cpu().numpy().tobytes() for tensor in tensors)).hexdigest()


def main() -> None:
    """Train and write what the user's process sees."""
    case = Case(**json.loads(os.environ["TINY_CASE"]))
    import importlib
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    warnings.filterwarnings("error", message=".*Leto")
    warnings.filterwarnings("ignore", message=".*is iterated again")
    for name in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
        logging.getLogger(f"{name}.utilities.rank_zero").setLevel(logging.INFO)  # Leto's own notices
    pl = importlib.import_module(case.flavour)
    importlib.import_module(f"{case.flavour}.loggers")
    pl.seed_everything(7, verbose=False)
    module, trainer = build(case, pl)
    results = []
    for _ in range(case.fits):
        for logger in trainer.loggers if case.log_around else ():
            logger.log_hyperparams({"fits": len(results)})
            logger.log_metrics({"before": float(len(results))}, trainer.global_step)
        if case.hparams:
            training, validation = data_module(case, trainer, pl), None
        else:
            training, validation = loaders(case, trainer, pl)
        if isinstance(training, pl.LightningDataModule):
            trainer.fit(module, datamodule=training)
        else:
            trainer.fit(module, training, validation)
        trainer.fit_loop.max_epochs = (trainer.fit_loop.max_epochs or 0) + case.epochs
        results.append(digest(module))
        for logger in trainer.loggers if case.log_around else ():
            logger.log_metrics({"after": float(len(results))}, trainer.global_step)
            logger.save()
    tested = trainer.test(module, DataLoader(Numbers(16), 4), verbose=False) if case.test_after else None
    if trainer.global_rank != 0:
        return
    loops = trainer.fit_loop.state_dict()
    result = {
        "weights": results,
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "loops": json.loads(json.dumps(loops, default=str)),
        "callback_metrics": hexadecimal(trainer.callback_metrics),
        "logged_metrics": hexadecimal(trainer.logged_metrics),
        "status": str(trainer.state.status),
        "best": os.path.basename(getattr(trainer.checkpoint_callback, "best_model_path", "") or ""),
        "should_stop": trainer.should_stop,
        "losses": hashlib.sha1(repr(module.losses).encode()).hexdigest(),
        "count": module.count,
        "tested": [hexadecimal(values) for values in tested] if tested is not None else None,
    }
    with open(f"{case.out}/result.json", "w") as file:
        json.dump(result, file)
    with open(f"{case.out}/recoveries.json", "w") as file:
        json.dump(getattr(trainer.strategy, "recoveries", None) or [], file)


if __name__ == "__main__":
    main()
