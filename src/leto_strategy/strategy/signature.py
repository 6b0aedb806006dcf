"""The options of `LetoStrategy` as a signature: LightningCLI reads names, types, defaults and texts from it.

Options of `LetoConfig` come from its fields and docstring, those of `DDPStrategy` from its own signature.
"""

import inspect
import re
import typing
from dataclasses import fields
from typing import Any

from leto_strategy.config import LetoConfig

DDP_OPTIONS = {
    "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin",
    "process_group_backend", "timeout",
}  # fmt: skip
DDP_LATER = {
    "ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period", "static_graph", "start_method",
}  # fmt: skip
DDP_NO_EFFECT = {"gradient_as_bucket_view", "broadcast_buffers", "init_sync"}


def declare_options(cls: Any, ddp: Any) -> None:
    """Give a strategy class the signature and the documentation of its options.

    Args:
        cls: `LetoStrategy` of a distribution.
        ddp: Its `DDPStrategy`.
    """
    own, texts = _own_options(), _texts(LetoConfig)
    inherited = _inherited_options(ddp)
    keywords = [*own, *inherited]
    cls.__init__.__signature__ = inspect.Signature(
        [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), *keywords], return_annotation=None
    )
    cls.__init__.__annotations__ = {keyword.name: keyword.annotation for keyword in keywords} | {"return": None}
    summary = inspect.cleandoc(cls.__doc__).partition("\n")[0]
    lines = [f"    {option.name}: {texts[option.name]}" for option in own]
    lines += [f"    {option.name}: As in DDPStrategy." for option in inherited]
    cls.__doc__ = "\n".join([summary, "", "Args:", *lines, "", "Raises:"])
    cls.__doc__ += "\n    ConfigurationError: An unknown option or a value that can't be.\n"


def _own_options() -> list[inspect.Parameter]:
    hints = typing.get_type_hints(LetoConfig)
    options = []
    for field in fields(LetoConfig):
        default: Any = field.default
        annotation = hints[field.name]
        if typing.get_origin(annotation) is tuple:  # a list in a file
            default = []
            annotation = list[typing.get_args(annotation)[0]]  # type: ignore[misc]
        options.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    return options


def _inherited_options(ddp: Any) -> list[inspect.Parameter]:
    """Those that have an effect, as keywords, with real types for the annotations that Lightning writes as text."""
    module = inspect.getmodule(ddp)
    options = []
    for parameter in inspect.signature(ddp.__init__).parameters.values():
        if parameter.name in DDP_OPTIONS:
            annotation = _evaluate(parameter.annotation, vars(module))
            options.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=annotation))
    return options


def _evaluate(annotation: Any, names: dict[str, Any]) -> Any:
    def annotated() -> None: ...

    annotated.__annotations__ = {"value": annotation}
    return typing.get_type_hints(annotated, globalns=names)["value"]


def _texts(config: type) -> dict[str, str]:
    """The text of each option in the docstring of its class."""
    section = inspect.cleandoc(config.__doc__ or "").partition("Args:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text) for name, text in entries}
