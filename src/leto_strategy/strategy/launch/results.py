"""What a trainer leaves behind and the user's process takes over: as if the call had run in the user's process."""

import pickle
import traceback
import warnings
from typing import Any

import torch
from torch import Tensor

from leto_strategy.strategy.capture.kept import KeptState, give_to
from leto_strategy.strategy.capture.loggers import LoggerState
from leto_strategy.strategy.capture.rng import capture_rng, restore_rng
from leto_strategy.strategy.flavour import Flavour

_LOOPS = ("fit_loop", "validate_loop", "test_loop", "predict_loop")


class RemoteError(Exception):
    """Carries the traceback of the trainer in which a user's exception was raised."""


def _path(fd: int) -> str:
    """Opened by this path a file has a position of its own; an inherited descriptor shares it with all processes."""
    return f"/proc/self/fd/{fd}"


def write_result(fd: int, result: dict[str, Any]) -> None:
    """Replace the content of the result file."""
    with open(_path(fd), "wb") as file:
        torch.save(result, file)


def read_result(fd: int) -> dict[str, Any]:
    """The result of an ended call; all trainers of a later call read it at the same time."""
    with open(_path(fd), "rb") as file:
        result: dict[str, Any] = torch.load(file, weights_only=False, map_location="cpu")
    return result


def portable_exception(error: BaseException) -> dict[str, Any]:
    """An exception as it travels; one that can't be pickled travels as its text."""
    text = "".join(traceback.format_exception(error))
    try:
        data: bytes | None = pickle.dumps(error)
        pickle.loads(data)  # type: ignore[arg-type]
    except Exception:
        data = None
    return {"data": data, "name": type(error).__name__, "message": str(error), "traceback": text}


def raise_remote(portable: dict[str, Any]) -> None:
    """Raise a trainer's exception here, with its own type and message and the trainer's traceback as its cause."""
    error: BaseException | None = None
    if portable["data"]:
        try:
            error = pickle.loads(portable["data"])
        except Exception:  # its class can't be built here: its text still can
            error = None
    if error is None:
        error = RuntimeError(f"{portable['name']}: {portable['message']}")
    raise error from RemoteError("\n" + portable["traceback"])


def collect(trainer: Any, returned: Any, kept: KeptState | None, loggers: LoggerState | None) -> dict[str, Any]:
    """Everything of a trainer that the user may look at after the call."""
    strategy = trainer.strategy
    module = trainer.lightning_module
    fitted = trainer.state.fn == "fit"
    connector = trainer._logger_connector
    checkpoint: dict[str, Any] = {}
    if fitted and strategy.optimizers:  # an exception may have come before them
        checkpoint = {
            "optimizers": [strategy.optimizer_state(optimizer) for optimizer in strategy.optimizers],
            "groups": [_names_of_groups(module, optimizer) for optimizer in strategy.optimizers],
            "schedulers": [config.scheduler.state_dict() for config in strategy.lr_scheduler_configs],
        }
    return {
        "returned": returned,
        "weights": _weights_of(module) if fitted or trainer.ckpt_path else None,
        "checkpoint": checkpoint,
        "state": (trainer.state.status, trainer.state.fn, trainer.state.stage),
        "metrics": tuple(
            {k: _plain(v) for k, v in values.items()}
            for values in (connector._callback_metrics, connector._logged_metrics, connector._progress_bar_metrics)
        ),
        "loops": {name: getattr(trainer, name).state_dict() for name in _LOOPS},
        "limits": (trainer.fit_loop.max_epochs, trainer.fit_loop.min_epochs, trainer.fit_loop.max_batches),
        "should_stop": trainer.should_stop,
        "rng": capture_rng(),
        "loggers": loggers.ended() if loggers is not None else [],
        "ckpt_path": trainer.ckpt_path,
        "callbacks": {cb.state_key: cb.state_dict() for cb in trainer.callbacks if cb.state_dict()},
        "attributes": kept.result() if kept is not None else None,
    }


def apply(trainer: Any, result: dict[str, Any], flavour: Flavour) -> Any:
    """Give a collected result to the Trainer of this process; returns what the call returned."""
    strategy, module = trainer.strategy, trainer.lightning_module
    strategy.connect(module)
    module.trainer = trainer
    if result["weights"] is not None:
        _load_weights(module, result["weights"])
    trainer.state.status, trainer.state.fn, trainer.state.stage = result["state"]
    connector = trainer._logger_connector
    connector._callback_metrics, connector._logged_metrics, connector._progress_bar_metrics = result["metrics"]
    fit_loop = trainer.fit_loop
    for name, state in result["loops"].items():
        getattr(trainer, name).load_state_dict(state)
        _clear_restart_flags(getattr(trainer, name), flavour.pytorch("loops.loop")._Loop)
    fit_loop.max_epochs, fit_loop.min_epochs, fit_loop.max_batches = result["limits"]
    trainer.should_stop = result["should_stop"]
    trainer._checkpoint_connector._ckpt_path = result["ckpt_path"]
    for callback in trainer.callbacks:
        if callback.state_key in result["callbacks"]:
            state = result["callbacks"][callback.state_key]
            if "dirpath" in state:
                callback.dirpath = state["dirpath"]
            callback.load_state_dict(state)
    if result["attributes"] is not None:
        give_to(trainer, flavour, result["attributes"])
    if result["checkpoint"]:
        strategy.remember_checkpoint(result["checkpoint"])
    restore_rng(result["rng"])
    return result["returned"]


def _names_of_groups(module: Any, optimizer: Any) -> list[list[str | None]]:
    """Names of the parameters of each group; None for one that the module does not have."""
    name_of = {id(parameter): name for name, parameter in module.named_parameters()}
    return [[name_of.get(id(p)) for p in group["params"]] for group in getattr(optimizer, "param_groups", [])]


def _weights_of(module: Any) -> list[tuple[str, Tensor, bool]]:
    """Every parameter and buffer: name, value, whether a state_dict holds it. Users override `state_dict` itself."""
    tensors = [(name, _plain(p), True) for name, p in module.named_parameters(remove_duplicate=False)]
    for prefix, owner in module.named_modules():
        for leaf, buffer in owner._buffers.items():
            if buffer is not None:
                name = f"{prefix}.{leaf}" if prefix else leaf
                tensors.append((name, _plain(buffer), leaf not in owner._non_persistent_buffers_set))
    return tensors


def _load_weights(module: Any, weights: list[tuple[str, Tensor, bool]]) -> None:
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    if not {name for name, _, _ in weights} <= names | {
        name for name, _ in module.named_buffers(remove_duplicate=False)
    }:
        module.configure_model()  # layers that only a trainer has made so far
    owners = dict(module.named_modules(remove_duplicate=False))
    missing = {prefix for name, _, _ in weights if (prefix := name.rpartition(".")[0]) not in owners}
    if missing:
        warnings.warn(
            f"Modules that were made during the call are in the trainers alone: {', '.join(sorted(missing))}. Make them"
            " in __init__ or configure_model to find their weights here.",
            stacklevel=2,
        )
    with torch.no_grad():
        for name, value, persistent in weights:
            prefix, _, leaf = name.rpartition(".")
            if prefix in missing:
                continue
            owner = owners[prefix]
            current = owner._parameters.get(leaf)
            if current is None:
                current = owner._buffers.get(leaf)
            if current is not None and current.shape == value.shape:
                current.data.copy_(value)
            elif current is not None:
                current.data = value
            elif leaf in owner._parameters:
                owner._parameters[leaf] = torch.nn.Parameter(value)
            elif leaf in owner._buffers:
                owner._buffers[leaf] = value
            else:
                owner.register_buffer(leaf, value, persistent=persistent)


def _clear_restart_flags(loop: Any, loop_class: type) -> None:
    loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    for child in vars(loop).values():
        if isinstance(child, loop_class):
            _clear_restart_flags(child, loop_class)


def _plain(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
