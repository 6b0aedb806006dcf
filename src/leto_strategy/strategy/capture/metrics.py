"""What Lightning has logged so far: result collections and the dictionaries of logged, callback and bar metrics."""

from collections.abc import Callable
from operator import is_
from typing import Any

from torch import Tensor

from leto_strategy.errors import UnsupportedFeatureError
from leto_strategy.strategy.capture import tensors
from leto_strategy.strategy.capture.sameness import CONSTANTS
from leto_strategy.strategy.capture.tensors import thaw

_FIELDS = ("value", "cumulated_batch_size", "_computed", "_forward_cache", "has_reset", "_update_count")
_META = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx",
    "metric_attribute",
)  # fmt: skip


class _MetricObject:
    """Stands for a `torchmetrics.Metric` of the module, by its place."""

    def __init__(self, path: str) -> None:
        self.path = path


class MetricState:
    """Captures and restores the training results and logged values.

    Args:
        trainer: The Trainer.
        result: Lightning's module of result collections.
        metric_class: `torchmetrics.Metric`.
        reduce: The strategy's `reduce`, which synchronised metrics call.
    """

    def __init__(self, trainer: Any, result: Any, metric_class: type, reduce: Any) -> None:
        self._trainer, self._result, self._reduce = trainer, result, reduce
        self._objects: dict[str, Any] = {
            name: module
            for name, module in trainer.lightning_module.named_modules()
            if isinstance(module, metric_class)
        }
        self._fields: dict[int, tuple[Any, tuple[Any, ...]]] = {}
        self._dicts = (_DictView(), _DictView(), _DictView())
        self._paths = {id(module): name for name, module in self._objects.items()}

    def capture(self) -> dict[str, Any]:
        """The state, ready to pack."""
        connector = self._trainer._logger_connector
        results = self._trainer.fit_loop.epoch_loop._results
        frozen: dict[int, Any] = {}  # most tensors are in several places

        def freeze(value: Any) -> Any:
            key = id(value)
            if key not in frozen:
                frozen[key] = tensors.freeze(value)
            return frozen[key]

        return {
            "results": {key: self._capture_one(metric, freeze) for key, metric in results.items()},
            "dicts": [
                view.capture(values)
                for view, values in zip(
                    self._dicts,
                    (connector._progress_bar_metrics, connector._logged_metrics, connector._callback_metrics),
                    strict=True,
                )
            ],
            "place": (connector._first_loop_iter, connector._current_fx),
            "objects": {name: metric_state(metric) for name, metric in self._objects.items()},
        }

    def _capture_one(self, metric: Any, freeze: Callable[[Any], Any]) -> tuple[Any, ...]:
        meta, state = metric.meta, metric.__dict__
        fields = self._fields.get(id(meta))
        if fields is None or fields[0] is not meta:
            fields = self._fields[id(meta)] = (meta, self._describe(meta))
        values = {name: freeze(state[name]) for name in _FIELDS if name in state}
        if not metric.is_tensor:
            values["value"] = _MetricObject(self._paths[id(metric.value)])
        return metric.is_tensor, fields[1], values

    def _describe(self, meta: Any) -> tuple[Any, ...]:
        """What a metric was logged with; it never changes."""
        sync = meta.sync
        if sync._group is not None:
            raise UnsupportedFeatureError(
                f"self.log({meta.name!r}, sync_dist_group=...) can't be carried over a failure by strategy='leto' yet."
            )
        return (
            tuple(getattr(meta, name) for name in _META),
            meta.reduce_fx.__name__,
            (sync._should, sync.rank_zero_only, sync._op),
        )

    def restore(self, captured: dict[str, Any]) -> None:
        """Put the state back; groups of processes are those of this generation."""
        results = self._trainer.fit_loop.epoch_loop._results
        results.clear()
        for name, state in captured["objects"].items():
            restore_metric(self._objects[name], state)
        for key, one in captured["results"].items():
            results[key] = self._restore_one(*one)
        connector = self._trainer._logger_connector
        bar, logged, callback = ({name: thaw(value) for name, value in values.items()} for values in captured["dicts"])
        connector._progress_bar_metrics, connector._logged_metrics, connector._callback_metrics = bar, logged, callback
        connector._first_loop_iter, connector._current_fx = captured["place"]

    def _restore_one(self, is_tensor: bool, description: tuple[Any, ...], values: dict[str, Any]) -> Any:
        fields, reduce_fx, sync = description
        meta = self._result._Metadata(reduce_fx=reduce_fx, **dict(zip(_META, fields, strict=True)))
        should, rank_zero_only, op = sync
        meta.sync = self._result._Sync(_should=should, fn=self._reduce, rank_zero_only=rank_zero_only, _op=op)
        metric = self._result._ResultMetric(meta, is_tensor)
        for name, value in values.items():
            if isinstance(value, _MetricObject):
                value = self._objects[value.path]
            metric.__dict__[name] = thaw(value)
        return metric


class _DictView:
    """A dictionary of logged values as it was captured last; most steps change none of the three."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._versions: list[int] = []
        self._frozen: dict[str, Any] = {}

    def capture(self, values: dict[str, Any]) -> dict[str, Any]:
        """The dictionary with its tensors as plain values."""
        current = list(values.values())
        versions = [value._version for value in current if type(value) is Tensor]
        same = len(current) == len(self._values) and all(map(is_, current, self._values))
        if not same or versions != self._versions or values.keys() != self._frozen.keys():
            self._values, self._versions = current, versions
            self._frozen = {name: tensors.freeze(value) for name, value in values.items()}
        return self._frozen


def metric_state(metric: Any) -> dict[str, Any]:
    """What a `torchmetrics.Metric` has gathered and how it stands."""
    state = metric.__dict__
    names = {*metric._defaults, "_computed", "_forward_cache"}
    names |= {name for name, value in state.items() if type(value) in CONSTANTS or type(value) in (Tensor, list)}
    return {name: _copy(getattr(metric, name)) for name in sorted(names) if hasattr(metric, name)}


def _copy(value: Any) -> Any:
    """What a later update in place does not change."""
    if type(value) is Tensor:
        return value.detach().clone()
    return list(value) if type(value) is list else value


def restore_metric(metric: Any, state: dict[str, Any]) -> None:
    """Inverse of `metric_state`."""
    for name, value in state.items():
        object.__setattr__(metric, name, value)
