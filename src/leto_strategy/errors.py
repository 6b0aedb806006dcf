"""Everything Leto raises by name. `ValueError` is for what a user typed, a named error for what the world did."""


class LetoError(Exception):
    """Base of all errors that Leto raises itself."""


class ConfigurationError(LetoError, ValueError):
    """An option of the strategy or of the Trainer that Leto can't run with; the message names it and the remedy."""


class UnsupportedOptimizerError(LetoError, ValueError):
    """An optimizer whose update Leto can't make crash-consistent; the message lists the supported ones."""


class UnsupportedFeatureError(LetoError, ValueError):
    """Something of Lightning that Leto does not keep exact yet: refused at the start, never done wrong."""


class LayoutMismatchError(LetoError):
    """A promoted trainer built another model or optimizer than the generation before it."""


class ResourceError(LetoError, OSError):
    """The machine lacks memory, file descriptors or rights; the message says how much and what to do."""


class ProtocolError(LetoError):
    """A message on one of Leto's sockets was malformed; the connection it came from is closed."""


class PoolError(LetoError):
    """The state manager can't be reached or refused a request."""


class AllocationMismatchError(PoolError):
    """A region of this name exists with another size or kind."""


class RecordError(LetoError):
    """A START or MID record is missing, torn or of another step."""


class UnrecoverableError(LetoError, RuntimeError):
    """Recovery gave up; the message names step, cause and what to do next."""


class StateChangedError(LetoError, RuntimeError):
    """Training state was changed outside the optimizer step, where a failure could apply the change twice."""


class PagesLostError(LetoError, RuntimeError):
    """Pages are lost that nothing can rebuild; the message says which. Nothing was written."""


class TooManyErasures(LetoError):
    """More pages of one protection group are lost than its parity can rebuild; nothing was written."""

    def __init__(self, num_lost: int, num_parity: int) -> None:
        super().__init__(
            f"{num_lost} pages of a protection group are lost, its {num_parity} parity pages can't rebuild so many"
        )
        self.num_lost, self.num_parity = num_lost, num_parity
