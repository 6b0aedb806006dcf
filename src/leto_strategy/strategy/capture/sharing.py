"""Objects that training data share with module, datamodule or a callback.

Attributes are recorded one by one: one that has changed comes back as another object. A data set that held the old one
is given the new one. Where a third object holds it, that one has a copy of its own: this is said, not trained with.
"""

from collections.abc import Iterator
from typing import Any

from leto_strategy.errors import StateChangedError
from leto_strategy.strategy.capture.sameness import is_frozen
from leto_strategy.strategy.data.attributes import objects_below

Attributes = dict[tuple[str, str], Any]
"""Attributes by name of their object and their own."""


def attributes_of(objects: list[tuple[str, Any]]) -> Attributes:
    """The attributes of objects that something else may hold, too."""
    values = {(owner, name): value for owner, held in objects for name, value in vars(held).items()}
    return {key: value for key, value in values.items() if not is_frozen(value)}


def share_again(trainer: Any, before: Attributes, after: Attributes) -> None:
    """Let training data hold what was restored.

    Args:
        trainer: The Trainer; its training loaders may be set up.
        before: `attributes_of` before the recorded ones were restored.
        after: The same afterwards.

    Raises:
        StateChangedError: A third object holds the same.
    """
    combined = trainer.fit_loop._combined_loader
    exchanged = {id(value): key for key, value in before.items() if after.get(key) is not value}
    if not exchanged or combined is None:
        return
    for loader in combined.flattened:
        for _, attributes in objects_below(loader):
            for name, value in attributes.items():
                key = exchanged.get(id(value))
                if key is None or key not in after:
                    continue
                third = next((other for other, held in before.items() if _holds(held, value)), None)
                if third is not None:
                    raise StateChangedError(
                        f"{key[1]!r} of {key[0]}, {third[1]!r} of {third[0]} and the training data hold one object that"
                        " training has changed. strategy='leto' gives each of them its own after a failure, so"
                        " that it can't go on exactly. Let data depend on nothing that training changes."
                    )
                attributes[name] = after[key]


def _holds(holder: Any, value: Any) -> bool:
    return any(part is value for part in _parts(holder))


def _parts(holder: Any) -> Iterator[Any]:
    """What an object holds, not itself."""
    if isinstance(holder, (list, tuple, set)):
        yield from holder
    elif isinstance(holder, dict):
        yield from holder.values()
    elif type(attributes := getattr(holder, "__dict__", None)) is dict:
        yield from attributes.values()
