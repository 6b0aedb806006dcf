"""Notices writes to parameters outside the optimizer step, by the version counters of their tensors."""

from operator import attrgetter

import torch

from leto_strategy.errors import StateChangedError


class ParameterVersions:
    """The versions that the parameters of a module had when this object was made."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._names, self._parameters = [], []
        for name, parameter in module.named_parameters():
            self._names.append(name)
            self._parameters.append(parameter)
        self._versions = self._read()

    def _read(self) -> list[int]:
        return list(map(attrgetter("_version"), self._parameters))

    def require_untouched(self) -> None:
        """Raise if something other than the optimizer step has written a parameter.

        Raises:
            StateChangedError: Names the first such parameter.
        """
        if self._read() == self._versions:
            return
        changed = [n for n, p, v in zip(self._names, self._parameters, self._versions, strict=True) if p._version != v]
        raise StateChangedError(
            f"The parameter {changed[0]!r} was changed outside the optimizer step ({len(changed)} in all). A failure"
            " could apply such a change twice, so strategy='leto' stops here. Change weights in on_train_start or"
            " earlier or through the optimizer, or use LetoStrategy(updater='sync_snapshot')."
        )
