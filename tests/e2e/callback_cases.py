"""Callbacks and parts of a module that a case may name, and the rows that train with them: each row is data."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from tests.e2e.logging_cases import Row, draws


def _checkpoint(**options: Any) -> Callable[[Any, str], Any]:
    def make(pl: Any, out: str) -> Any:
        where = {"dirpath": f"{out}/checkpoints-{options['into']}"} if "into" in options else {}
        return pl.callbacks.ModelCheckpoint(**where, **{k: v for k, v in options.items() if k != "into"})

    return make


def _average(pl: Any, out: str) -> Any:
    """Holds modules of its own: an average of the weights and a metric."""
    import torchmetrics

    class Average(pl.Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.average = torch.optim.swa_utils.AveragedModel(pl_module.head, avg_fn=lambda a, p, n: 0.9 * a + 0.1 * p)
            self.norm = torchmetrics.MeanMetric()
            self.held = {"norms": [torchmetrics.MaxMetric()]}

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.average.update_parameters(pl_module.head)
            value = self.average.module.weight.norm().detach()
            self.norm.update(value)
            self.held["norms"][0].update(value)
            both = {"average": self.norm.compute().item(), "largest": self.held["norms"][0].compute().item()}
            pl_module.note(step=trainer.global_step, **{k: v.hex() for k, v in both.items()}, part="average")

    return Average()


CALLBACKS: dict[str, Callable[[Any, str], Any]] = {
    "draws": lambda pl, out: draws(pl),
    "average": _average,
    "last_link": _checkpoint(into="link", monitor="val", save_top_k=2, save_last="link", filename="{epoch}-{step}"),
    "max_steps_top": _checkpoint(into="max", monitor="loss", mode="max", every_n_train_steps=3, save_top_k=2),
    "weights_only": _checkpoint(into="w", save_weights_only=True, every_n_epochs=2, save_top_k=-1, filename="{epoch}"),
    "epoch_end": _checkpoint(
        into="e",
        monitor="loss_epoch",
        save_on_train_epoch_end=True,
        auto_insert_metric_name=False,
        filename="{epoch}-loss={loss_epoch:.3f}",
    ),
    "overwriting": _checkpoint(into="o", every_n_train_steps=2, filename="same", enable_version_counter=False),
    "same_name": _checkpoint(into="s", every_n_train_steps=5, filename="same", save_top_k=-1),
    "last_only": _checkpoint(into="l", save_top_k=0, save_last=True),
    "in_log_dir": _checkpoint(monitor="val", mode="max"),
    "by_time": _checkpoint(into="time", train_time_interval=timedelta(days=1), save_top_k=-1),
    "by_no_time": _checkpoint(into="notime", train_time_interval=timedelta(0), filename="now", save_top_k=1),
    "on_exception": _checkpoint(into="x", save_top_k=0, every_n_train_steps=1000, save_on_exception=True),
    "exception": lambda pl, out: pl.callbacks.OnExceptionCheckpoint(f"{out}/checkpoints-oe"),
    "timer": lambda pl, out: pl.callbacks.Timer(duration=timedelta(days=1), interval="step"),
    "summary": lambda pl, out: pl.callbacks.ModelSummary(max_depth=2),
    "rich_bar": lambda pl, out: pl.callbacks.RichProgressBar(),
    "bar": lambda pl, out: pl.callbacks.TQDMProgressBar(refresh_rate=2),
    "stop_divergence": lambda pl, out: pl.callbacks.EarlyStopping("loss", divergence_threshold=1e9, patience=50),
    "stop_epoch": lambda pl, out: pl.callbacks.EarlyStopping(
        "loss_epoch", mode="max", patience=1, min_delta=10.0, check_on_train_epoch_end=True
    ),
    "stop_threshold": lambda pl, out: pl.callbacks.EarlyStopping("val", stopping_threshold=1e9, strict=False),
}


class Annealing:
    """Plain attributes of submodules that change in each step."""

    def __init__(self, module: Any) -> None:
        module.net[3].seen, module.net[0].note = 0, []

    def __call__(self, module: Any, x: torch.Tensor) -> None:
        dropout = module.net[3]
        dropout.p, dropout.seen = 0.1 + 0.5 * dropout.p, dropout.seen + 1
        module.net[0].note.append(dropout.p)
        module.note(
            part="annealing",
            step=module.global_step + 1,
            p=dropout.p.hex(),
            seen=dropout.seen,
            n=len(module.net[0].note),
        )


class Metrics:
    """Metrics in every place where a module can hold them."""

    def __init__(self, module: Any) -> None:
        import torchmetrics

        module.mean = torchmetrics.MeanMetric()
        module.listed = torch.nn.ModuleList([torchmetrics.MaxMetric()])
        module.collected = torchmetrics.MetricCollection(
            {"lo": torchmetrics.MinMetric(), "s": torchmetrics.SumMetric()}
        )
        module.running = torchmetrics.aggregation.RunningMean(window=3)
        module.plain = {"cat": [torchmetrics.CatMetric()]}

    def __call__(self, module: Any, x: torch.Tensor) -> None:
        value = x.mean()
        module.mean(value)
        module.listed[0].update(value)
        module.collected.update(value)
        module.running.update(value)
        module.plain["cat"][0].update(value)
        module.log("mean", module.mean, on_step=True, on_epoch=True)
        module.log("listed", module.listed[0], on_epoch=True)
        module.log_dict(module.collected, on_epoch=True)
        module.note(
            part="metrics",
            step=module.global_step + 1,
            running=module.running.compute().item().hex(),
            cat=[v.hex() for v in module.plain["cat"][0].compute().reshape(-1).tolist()],
        )


PARTS: dict[str, Callable[[Any], Any]] = {"annealing": Annealing, "metrics": Metrics}


ROWS: dict[str, Row] = {
    "attributes of submodules": Row({"parts": ["annealing"]}, ((1, "forward", 2), (0, "chunk_updating", 5))),
    "torchmetrics in lists and dictionaries": Row(
        {"parts": ["metrics"], "loggers": ["tensorboard"], "callbacks": []},
        ((0, "backward", 2), (1, "chunk_updating", 8)),
    ),
    "modules that callbacks hold": Row({"callbacks": ["average"]}, ((0, "batch_end", 2), (1, "chunk_updating", 7))),
    "several ModelCheckpoints": Row(
        {
            "callbacks": ["last_link", "max_steps_top", "overwriting", "in_log_dir", "same_name"],
            "loggers": ["tensorboard"],
        },
        ((0, "checkpoint_middle", 2), (0, "checkpoint_after", 5), (1, "chunk_updating", 9)),
    ),
    "ModelCheckpoint by epochs": Row(
        {
            "callbacks": ["weights_only", "epoch_end", "last_only", "on_exception", "exception"],
            "epochs": 4,
            "batches": 3,
        },
        ((0, "checkpoint_middle", 5), (1, "epoch_end", 9), (0, "chunk_updating", 10)),
    ),
    "ModelCheckpoint by time, summary, bar": Row(
        {
            "callbacks": ["by_time", "by_no_time", "summary", "rich_bar"],
            "trainer": {"enable_progress_bar": True, "enable_model_summary": True},
        },
        ((0, "batch_end", 2), (1, "chunk_updating", 7)),
    ),
    "EarlyStopping at a threshold": Row(
        {"callbacks": ["stop_threshold", "bar"], "trainer": {"enable_progress_bar": True}},
        ((1, "chunk_updating", 1), (0, "validation", 3)),
    ),
    "EarlyStopping in its other modes, Timer": Row(
        {"callbacks": ["stop_divergence", "stop_epoch", "timer"], "epochs": 5, "batches": 4},
        ((0, "epoch_end", 4), (1, "chunk_updating", 6)),
    ),
    "three ranks with all that a user keeps": Row(
        {"devices": 3, "parts": ["annealing", "metrics"], "callbacks": ["average", "last_link"]},
        ((2, "batch_end", 3), (1, "chunk_updating", 8)),
    ),
}
