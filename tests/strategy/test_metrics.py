"""What is captured of logged values: what they are now, whoever wrote them, in memory that does not grow."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector import result
from torch import nn
from torchmetrics import MeanMetric

from leto_strategy.errors import UnsupportedFeatureError
from leto_strategy.strategy.capture.metrics import MetricState
from leto_strategy.strategy.capture.packing import pack, unpack


def reduce(value: Any, *_: Any, **__: Any) -> Any:
    return value


def make_trainer() -> Any:
    connector = SimpleNamespace(
        _progress_bar_metrics={},
        _logged_metrics={},
        _callback_metrics={},
        _first_loop_iter=None,
        _current_fx=None,
    )
    loop = SimpleNamespace(_results=result._ResultCollection(training=True))
    return SimpleNamespace(
        lightning_module=nn.Linear(1, 1), _logger_connector=connector, fit_loop=SimpleNamespace(epoch_loop=loop)
    )


def make_state(trainer: Any) -> MetricState:
    return MetricState(trainer, result, result.Metric, reduce)


def log(trainer: Any, value: float) -> None:
    trainer.fit_loop.epoch_loop._results.log(
        "training_step", "loss", torch.tensor(value), on_step=True, on_epoch=True, batch_size=2, sync_dist_fn=reduce
    )


def test_a_value_logged_at_every_step_is_described_once() -> None:
    trainer = make_trainer()
    state = make_state(trainer)
    for step in range(5):
        log(trainer, float(step))
        captured = unpack(pack(state.capture()))
    assert len(state._descriptions) == 1
    other = make_trainer()
    make_state(other).restore(captured)
    for trainer_now in (trainer, other):
        log(trainer_now, 0.3)
    mine, theirs = (t.fit_loop.epoch_loop._results["training_step.loss"] for t in (trainer, other))
    assert theirs.meta == mine.meta
    assert theirs.compute().item().hex() == mine.compute().item().hex()


@pytest.mark.parametrize("name", ["value", "cumulated_batch_size"])
def test_a_write_that_raises_no_version_counter_is_seen(name: str) -> None:
    """As that of a collective."""
    trainer = make_trainer()
    state = make_state(trainer)
    log(trainer, 1.0)
    metric = trainer.fit_loop.epoch_loop._results["training_step.loss"]
    trainer._logger_connector._callback_metrics["copy"] = getattr(metric, name)
    state.capture()
    version = getattr(metric, name)._version
    getattr(metric, name).numpy()[...] = 7
    assert getattr(metric, name)._version == version
    captured = state.capture()
    assert captured["dicts"][2]["copy"][2] == 7
    other = make_trainer()
    make_state(other).restore(unpack(pack(captured)))
    assert getattr(other.fit_loop.epoch_loop._results["training_step.loss"], name).item() == 7


def test_a_metric_that_a_start_hook_made_is_found_and_one_outside_the_module_is_refused() -> None:
    trainer = make_trainer()
    state = make_state(trainer)
    trainer.lightning_module.late = MeanMetric()
    trainer.lightning_module.late.update(3.0)
    log_metric(trainer, trainer.lightning_module.late)
    captured = unpack(pack(state.capture()))
    other = make_trainer()
    restored = make_state(other)
    other.lightning_module.late = MeanMetric()  # its start hooks have run
    restored.restore(captured)
    assert other.lightning_module.late.compute() == 3.0
    assert other.fit_loop.epoch_loop._results["training_step.late"].value is other.lightning_module.late
    outside = make_trainer()
    log_metric(outside, MeanMetric())
    with pytest.raises(UnsupportedFeatureError, match="MeanMetric that is no submodule"):
        make_state(outside).capture()


def log_metric(trainer: Any, metric: Any) -> None:
    trainer.fit_loop.epoch_loop._results.log(
        "training_step", "late", metric, on_step=False, on_epoch=True, batch_size=1, sync_dist_fn=reduce,
        metric_attribute="late",
    )  # fmt: skip
