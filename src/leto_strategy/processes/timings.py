"""The supervisor's own waits, in seconds, in one place. Tests shorten them through `LaunchSpec.timings`."""

from dataclasses import dataclass, fields
from typing import Any

from leto_strategy.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Timings:
    """How long the supervisor waits for what.

    Args:
        peer_grace: For a peer's death after a communicator error: later it was no echo.
        disconnect_grace: For the end of a trainer that closed its connection.
        lower_rank: For the same exception of a lower rank, which is then the one that is raised.
        raise_grace: For the other ranks when one rank raises the user's exception.
        delivery: For a trainer's exception hooks and its answer.
        farewell: For trainers, managers and zygote to end by themselves after "bye".
        first_step: For the first READY after a recovery, before its record is written without it.
        zygote: For the zygote's imports before trainers are started without it.
        fork: For the zygote's answer to one request.
        shadow_backoff: Before shadows that failed are started again; doubles with each failure in a row.
        shadow_backoff_max: The longest of these waits.
        manager: For a state manager to listen.
        watch: Between two looks at the trainers' progress.
        exits: On a GPU, between two looks whether an active trainer is exiting.
        driver: For an answer about the GPUs before it counts as unknown.
    """

    peer_grace: float = 1.0
    disconnect_grace: float = 1.0
    lower_rank: float = 0.1
    raise_grace: float = 1.0
    delivery: float = 8.0
    farewell: float = 5.0
    first_step: float = 2.0
    zygote: float = 60.0
    fork: float = 5.0
    shadow_backoff: float = 0.5
    shadow_backoff_max: float = 30.0
    manager: float = 20.0
    watch: float = 1.0
    exits: float = 0.01
    driver: float = 1.0

    @classmethod
    def with_overrides(cls, overrides: dict[str, Any]) -> "Timings":
        """The defaults, some of them replaced.

        Raises:
            ProtocolError: no such wait, or not a number.
        """
        names = {f.name for f in fields(cls)}
        for name, seconds in overrides.items():
            if name not in names or isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or seconds < 0:
                raise ProtocolError(f"no wait {name!r} of {seconds!r} s")
        return cls(**overrides)
