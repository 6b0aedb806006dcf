"""The table of what works: each row is a line of docs/compatibility.md and, where it is exact, a run that is killed.

`python -m tests.e2e.compatibility` writes the document; a test compares the two.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from tests.e2e import callback_cases, logging_cases
from tests.e2e.data import KINDS
from tests.e2e.entries import ENTRIES
from tests.e2e.tiny import Case

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"


class Status(StrEnum):
    """What a user gets."""

    EXACT = "exact"
    SNAPSHOT = "exact, by snapshots"
    AT_LEAST_ONCE = "at least once"
    REFUSED = "refused"
    OUTSIDE = "outside"


@dataclass(frozen=True)
class Row:
    """One feature.

    Args:
        area: Heading in the document.
        feature: As a user would call it.
        status: What a user gets.
        note: Reason, condition, or what to do instead.
        case: The run that shows it; None where another test does.
        last_step: A step that the run certainly has; the kill inside the update happens there.
        texts: Of a refusal: what the error must say.
        test: Where another test shows it: its name.
    """

    area: str
    feature: str
    status: Status
    note: str = ""
    case: Case | None = None
    last_step: int = 5
    texts: tuple[str, ...] = ()
    test: str = ""

    @property
    def name(self) -> str:
        """Names the test."""
        return f"{self.area}: {self.feature}".replace("`", "").replace("/", "|")


def exact(area: str, feature: str, note: str = "", *, last_step: int = 5, **case: Any) -> Row:
    """A row that is exact with the transactional updater."""
    return Row(area, feature, Status.EXACT, note, Case(**case), last_step)


def snapshot(area: str, feature: str, note: str = "", *, last_step: int = 5, **case: Any) -> Row:
    """A row that is exact by whole-state snapshots."""
    return Row(area, feature, Status.SNAPSHOT, note, Case(**case), last_step)


def refused(area: str, feature: str, note: str, *texts: str, **case: Any) -> Row:
    """A row that is refused in the user's process, before anything is started."""
    return Row(area, feature, Status.REFUSED, note, Case(**case), texts=texts)


_UNUSED = {"find_unused_parameters": True}

TRAINING = [
    exact("Precision", "`32-true`"),
    exact("Precision", "`64-true`", trainer={"precision": "64-true"}),
    exact("Precision", "`bf16-mixed`", trainer={"precision": "bf16-mixed"}),
    exact("Precision", "`bf16-true`", trainer={"precision": "bf16-true"}),
    exact(
        "Precision",
        "`16-mixed` with GradScaler, overflowing steps included",
        "a skipped step is a step of its own; on the CPU Lightning makes `bf16-mixed` of `16-mixed` unless it is given"
        " the plugin",
        plugins=["scaler"],
        last_step=7,
    ),
    refused(
        "Precision",
        "Transformer Engine, bitsandbytes",
        "their weights are no plain tensors",
        "precision",
        plugins=["foreign_precision"],
    ),
    exact("Optimisation", "AdamW, several parameter groups, frozen parameters"),
    exact("Optimisation", "Adam with amsgrad", optimizer="amsgrad"),
    exact("Optimisation", "SGD with Nesterov momentum", optimizer="sgd", devices=3),
    snapshot("Optimisation", "RMSprop and all others of `torch.optim`", model="RMSprop"),
    snapshot("Optimisation", "Adagrad", model="Adagrad"),
    snapshot("Optimisation", "NAdam", model="NAdam", devices=1),
    snapshot("Optimisation", "Rprop", model="Rprop", devices=1),
    snapshot("Optimisation", "LBFGS", "the closure runs several times a step", model="LBFGS", clip=None),
    snapshot("Optimisation", "a subclass of an optimizer, or an own one", model="own_subclass"),
    snapshot("Optimisation", "an own optimizer with attributes and last gradients", model="counting", clip=None),
    snapshot("Optimisation", "an optimizer around another one (Lookahead)", model="lookahead"),
    snapshot(
        "Optimisation",
        "gradients of several losses, mixed by hand",
        model="manual_gradient_surgery",
        clip=None,
        devices=3,
    ),
    snapshot("Optimisation", "hooks of `register_step_pre_hook` and `register_step_post_hook`", model="step_hooks"),
    exact("Optimisation", "`fused=True`", model="fused"),
    snapshot(
        "Optimisation",
        "manual optimisation with two optimizers, `toggle_optimizer`",
        "the step is the whole `training_step`",
        model="manual_two_optimizers",
        options=_UNUSED,
        clip=None,
        devices=3,
    ),
    snapshot(
        "Optimisation",
        "manual optimisation that accumulates over batches",
        model="manual_accumulation",
        clip=None,
        flavour="pytorch_lightning",
    ),
    exact("Optimisation", "`accumulate_grad_batches`", trainer={"accumulate_grad_batches": 4}, last_step=3),
    exact(
        "Optimisation",
        "`accumulate_grad_batches` with GradScaler",
        plugins=["scaler"],
        trainer={"accumulate_grad_batches": 2},
        last_step=4,
    ),
    exact(
        "Optimisation",
        "GradientAccumulationScheduler",
        callbacks=["checkpoint", "accumulation_scheduler", "lr_monitor"],
        last_step=7,
    ),
    exact(
        "Optimisation", "own accumulation in `optimizer_step`", model="steps_every_second_batch", clip=None, last_step=3
    ),
    exact("Optimisation", "clipping by norm", trainer={"accumulate_grad_batches": 3}, devices=3, last_step=3),
    exact("Optimisation", "clipping by value", trainer={"gradient_clip_algorithm": "value"}),
    exact("Optimisation", "no scheduler, no clipping", schedulers=[], clip=None),
    exact("Optimisation", "schedulers by epoch, ReduceLROnPlateau", schedulers=["step_epoch", "plateau_epoch"]),
    exact(
        "Optimisation",
        "unused parameters",
        "with several ranks say `find_unused_parameters=True`, or `strategy='leto_find_unused_parameters_true'`",
        model="unused_parameters",
        options=_UNUSED,
        devices=3,
    ),
    exact(
        "Optimisation",
        "`training_step` that returns None",
        "Lightning allows it with one rank only",
        model="none_loss",
        devices=1,
    ),
    exact("Optimisation", "small chunks and buckets", options={"chunk_bytes": 256, "bucket_cap_mb": 0.0002}, width=64),
    snapshot(
        "Optimisation",
        "a hook that writes weights (weight clipping)",
        "say `updater='sync_snapshot'`: the transaction can't notice writes through `.data`",
        model="clips_weights",
        options={"updater": "sync_snapshot"},
    ),
    Row(
        "Optimisation",
        "torch.compile, CUDA graphs, `static_graph`, DDP communication hooks",
        Status.OUTSIDE,
        "not tested, or refused by name",
    ),
    exact("Model", "BatchNorm and other buffers, Dropout, hooks that draw", model="many_hooks", clip=None),
    exact("Model", "state carried from batch to batch (RNN)", model="rnn_state"),
    exact("Model", "hooks and attributes of all kinds", rough=True, options={"chunk_bytes": 256}),
    exact(
        "Model",
        "`on_train_batch_start` that ends the epoch",
        model="ends_epoch_early",
        devices=3,
        last_step=4,
        epochs=3,
    ),
    refused(
        "Model",
        "SyncBatchNorm",
        "torch's runs on GPUs only",
        "SyncBatchNorm",
        "leave it out",
        trainer={"sync_batchnorm": True},
    ),
    snapshot(
        "Callbacks",
        "BackboneFinetuning, BaseFinetuning",
        model="finetuning",
        callbacks=["checkpoint", "finetuning"],
        options=_UNUSED,
        last_step=8,
    ),
    snapshot("Callbacks", "WeightAveraging", callbacks=["averaging", "checkpoint"]),
    snapshot("Callbacks", "EMAWeightAveraging", callbacks=["ema", "checkpoint"], devices=3),
    exact("Callbacks", "EarlyStopping", callbacks=["checkpoint", "stop_early"], epochs=5, last_step=3),
    exact(
        "Callbacks",
        "progress bar and summary",
        trainer={"enable_progress_bar": True, "enable_model_summary": True},
    ),
    refused(
        "Callbacks",
        "StochasticWeightAveraging",
        "it exchanges schedulers in the middle of training; use WeightAveraging",
        "StochasticWeightAveraging",
        "WeightAveraging",
        callbacks=["swa"],
    ),
    refused(
        "Callbacks",
        "ModelPruning",
        "it replaces parameters in the middle of training",
        "ModelPruning",
        callbacks=["pruning"],
    ),
    refused(
        "Callbacks",
        "Tuner, LearningRateFinder, BatchSizeFinder",
        "run them once with `strategy='auto'`",
        "LearningRateFinder",
        "strategy='auto'",
        callbacks=["lr_finder"],
    ),
    exact("Trainer", "`max_steps`", max_steps=8, epochs=-1),
    exact("Trainer", "`pytorch_lightning`", flavour="pytorch_lightning"),
    exact("Trainer", "validation at the end of epochs only", val_check_interval=1.0),
    exact("Trainer", "no logger, no checkpoints", logger=False, callbacks=[]),
]


def _of(area: str, feature: str, status: str, note: str, test: str) -> Row:
    return Row(area, feature, Status(status), note, test=test)


OTHERS = [
    *(_of("Data", name, kind.status, kind.reason, "tests/e2e/test_data.py") for name, kind in KINDS.items()),
    *(_of("Loggers", n, r.status, r.reason, "tests/e2e/test_user_rows.py") for n, r in logging_cases.ROWS.items()),
    *(_of("Callbacks", n, r.status, r.reason, "tests/e2e/test_user_rows.py") for n, r in callback_cases.ROWS.items()),
    *(_of("Ways to start", e.name, e.status, e.reason, "tests/e2e/test_entry.py") for e in ENTRIES),
    _of("Ways to start", '`fit(ckpt_path=...)`, "last", "best"', "exact", "", "tests/e2e/test_entry.py"),
    _of("Ways to start", "`leto train`", "exact", "", "tests/pretraining/test_app.py"),
    _of("Ways to start", "notebooks, prompts, standard input", "refused", "no script", "tests/e2e/test_bad_input.py"),
    _of("Ways to start", "torchrun, SLURM, several nodes", "refused", "one node yet", "tests/e2e/test_bad_input.py"),
    _of("Trainer", "`validate`, `test`, `predict`", "exact", "begun again when they fail", "tests/e2e/test_scripts.py"),
    _of("Trainer", "`max_time`, Timer", "outside", "they read a clock, which goes on", "tests/e2e/test_entry.py"),
]

ROWS: list[Row] = [*TRAINING, *OTHERS]

_HEAD = """# What works with strategy="leto"

This page is made from the table that the tests run (`tests/e2e/compatibility.py`); don't edit it.

- **exact**: a run that is killed, once at a random point and once inside the update, leaves the same losses, batches,
  learning rates, metrics, rows, checkpoint files, counters and weights as a run that is not, bit for bit.
- **exact, by snapshots**: the same, with the updater `sync_snapshot`, which Leto chooses by itself and says so in one
  line. It copies parameters, gradients and optimizer state after every step: 16 bytes a parameter with AdamW in fp32;
  two such copies stay in memory.
- **at least once**: nothing is lost; what belongs to an interrupted step may come twice.
- **refused**: an error that names the option and what to do instead, before memory is allocated or a process started.
- **outside**: no promise.
"""


def document() -> str:
    """The text of docs/compatibility.md."""
    lines = [_HEAD]
    for area in dict.fromkeys(row.area for row in ROWS):
        lines += [f"## {area}", "", "| feature | result | note |", "|---|---|---|"]
        lines += [f"| {row.feature} | {row.status} | {row.note} |" for row in ROWS if row.area == area]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    DOCUMENT.write_text(document())
