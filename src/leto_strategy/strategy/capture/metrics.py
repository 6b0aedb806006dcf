"""What Lightning has logged so far: result collections and the dictionaries of logged, callback and bar metrics."""

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from torch import Tensor

from leto_strategy.errors import UnsupportedFeatureError
from leto_strategy.strategy.capture.packing import pack, unpack
from leto_strategy.strategy.capture.sameness import CONSTANTS
from leto_strategy.strategy.capture.tensors import freeze, thaw

_FIELDS = ("value", "cumulated_batch_size", "_computed", "_forward_cache", "has_reset", "_update_count")
_META = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx",
    "metric_attribute",
)  # fmt: skip


class _MetricObject:
    """Stands for a `torchmetrics.Metric` of the module, by its place."""

    def __init__(self, path: str) -> None:
        self.path = path


_Description = tuple[Any, bytes, Callable[[Any], tuple[Any, ...]]]
"""The metric of a logged value; its fields' names and what it was logged with, packed; reads these fields."""


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
        self._metric_class = metric_class
        self._descriptions: dict[str, _Description] = {}
        self._find()

    def _find(self) -> None:
        """Look for the metrics of the module; a start hook may make some."""
        self._objects: dict[str, Any] = {
            name: module
            for name, module in self._trainer.lightning_module.named_modules()
            if isinstance(module, self._metric_class)
        }
        self._paths = {id(module): name for name, module in self._objects.items()}

    def _path(self, metric: Any) -> str:
        """The place of a metric that was logged.

        Raises:
            UnsupportedFeatureError: It is no part of the module.
        """
        if id(metric) not in self._paths:
            self._find()
        if id(metric) not in self._paths:
            raise UnsupportedFeatureError(
                f"self.log was given a {type(metric).__name__} that is no submodule of the LightningModule, which"
                " strategy='leto' can't carry over a failure; keep it as an attribute of the module."
            )
        return self._paths[id(metric)]

    def capture(self) -> dict[str, Any]:
        """The state, ready to pack."""
        connector = self._trainer._logger_connector
        results = self._trainer.fit_loop.epoch_loop._results
        known: dict[int, Any] = {}  # most tensors are in several places
        dicts = connector._progress_bar_metrics, connector._logged_metrics, connector._callback_metrics
        return {
            "results": {key: self._capture_one(key, metric, known) for key, metric in results.items()},
            "dicts": [_frozen_values(values, known) for values in dicts],
            "place": (connector._first_loop_iter, connector._current_fx),
            "objects": {name: metric_state(metric) for name, metric in self._objects.items()},
        }

    def _capture_one(self, key: str, metric: Any, known: dict[int, Any]) -> tuple[Any, ...]:
        state = metric.__dict__
        described = self._descriptions.get(key)
        if described is None or described[0] is not metric:
            described = self._descriptions[key] = self._describe(metric)
        _, description, read = described
        values = list(read(state))
        for i, value in enumerate(values):
            if type(value) is Tensor:
                values[i] = _frozen(value, known)
        if not metric.is_tensor:
            values[0] = _MetricObject(self._path(values[0]))
        return metric.is_tensor, description, values

    def _describe(self, metric: Any) -> _Description:
        """What a metric was logged with. It never changes: Lightning refuses other arguments for the same metric."""
        meta, sync = metric.meta, metric.meta.sync
        if sync._group is not None:
            raise UnsupportedFeatureError(
                f"self.log({meta.name!r}, sync_dist_group=...) can't be carried over a failure by strategy='leto' yet."
            )
        fields = [name for name in _FIELDS if name in vars(metric)]
        given = tuple(getattr(meta, name) for name in _META)
        arguments = given, meta.reduce_fx.__name__, (sync._should, sync.rank_zero_only, sync._op)
        return metric, pack((fields, *arguments)), itemgetter(*fields)

    def restore(self, captured: dict[str, Any]) -> None:
        """Put the state back; groups of processes are those of this generation."""
        results = self._trainer.fit_loop.epoch_loop._results
        results.clear()
        if not captured["objects"].keys() <= self._objects.keys():
            self._find()
        for name, state in captured["objects"].items():
            restore_metric(self._objects[name], state)
        for key, one in captured["results"].items():
            results[key] = self._restore_one(*one)
        connector = self._trainer._logger_connector
        bar, logged, callback = ({name: thaw(value) for name, value in values.items()} for values in captured["dicts"])
        connector._progress_bar_metrics, connector._logged_metrics, connector._callback_metrics = bar, logged, callback
        connector._first_loop_iter, connector._current_fx = captured["place"]

    def _restore_one(self, is_tensor: bool, description: bytes, values: list[Any]) -> Any:
        fields, given, reduce_fx, sync = unpack(description)
        meta = self._result._Metadata(reduce_fx=reduce_fx, **dict(zip(_META, given, strict=True)))
        should, rank_zero_only, op = sync
        meta.sync = self._result._Sync(_should=should, fn=self._reduce, rank_zero_only=rank_zero_only, _op=op)
        metric = self._result._ResultMetric(meta, is_tensor)
        for name, value in zip(fields, values, strict=True):
            if isinstance(value, _MetricObject):
                value = self._objects[value.path]
            metric.__dict__[name] = thaw(value)
        return metric


def _frozen(tensor: Tensor, known: dict[int, Any]) -> Any:
    """A plain value, read once in each capture: a collective writes in place without raising the version counter."""
    key = id(tensor)
    if key not in known:
        known[key] = freeze(tensor)
    return known[key]


def _frozen_values(values: dict[str, Any], known: dict[int, Any]) -> dict[str, Any]:
    """The dictionary with its tensors as plain values."""
    frozen = values.copy()
    for name, value in values.items():
        if type(value) is Tensor:
            frozen[name] = _frozen(value, known)
    return frozen


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
