"""What the launcher, the supervisor and the trainers say to each other: typed, checked at the receiving end.

Frames themselves (length, JSON, descriptors) belong to `memory.wire`. Whoever sends something else than what is written
here gets `ProtocolError`, and the receiver closes that connection.
"""

import os
import re
import signal
from dataclasses import asdict, dataclass, field
from typing import Any

from leto_strategy.errors import ProtocolError
from leto_strategy.faults import Fault
from leto_strategy.memory.places import HANDLE_BYTES
from leto_strategy.processes.timings import Timings
from leto_strategy.recovery.classification import REPORT_KINDS, signal_name

TEXT_MAX = 256 * 1024
"""Longest traceback or message that is passed on, in characters; the rest is cut."""

_DEVICE = re.compile(r"cpu|cuda:(0|[1-9][0-9]{0,3})")


@dataclass(frozen=True, slots=True)
class Script:
    """How the user's script is run again inside a forked process.

    Args:
        path: The script as given on the command line; None for ``-m``.
        module: The module of ``python -m module``; None for a script.
        argv: What the script saw as sys.argv.
        path0: What the script saw as sys.path[0].
    """

    path: str | None
    module: str | None
    argv: tuple[str, ...]
    path0: str

    def __post_init__(self) -> None:
        if (self.path is None) == (self.module is None):
            raise ProtocolError("a script has a path or a module")

    @classmethod
    def from_json(cls, value: Any) -> "Script":
        """Inverse of `asdict`.

        Raises:
            ProtocolError: not a script.
        """
        frame = checked(value, dict, "script")
        return cls(
            path=get(frame, "path", str, None),
            module=get(frame, "module", str, None),
            argv=tuple(_strings(frame, "argv")),
            path0=get(frame, "path0", str),
        )


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """Everything the supervisor is told about a job.

    Args:
        job: Random name of the job, letters and digits.
        argv: The command of a trainer: the interpreter, its flags, the script, its arguments.
        env: Environment of the trainers, without any variable of Leto's.
        cwd: Working directory of the trainers.
        world: Number of ranks.
        devices: The device of each rank, "cpu" or "cuda:N" with torch's number N; empty: all on the CPU.
        handle_bytes: Size of a handle of protected device memory.
        call: Index of the `fit`/`validate`/`test`/`predict` call within the script.
        function: Name of that call.
        root_dir: Directory for events and logs (below ``leto/``); None: write none.
        script: How to run the script in a forked process; None: it can't be, use new interpreters.
        shadows: Shadow trainers per rank, 0 or 1.
        zygote: Fork trainers from a process that has imported torch and Lightning.
        zygote_modules: What that process imports.
        max_restarts: See `LetoConfig`.
        hang_timeout: Seconds; see `LetoConfig`.
        reap_timeout: Seconds; see `LetoConfig`.
        stop_grace: Seconds; see `LetoConfig`.
        loggers: Passed on to the trainers.
        files: Names of further files that trainers inherit; their descriptors come last with the launch.
        rerun_first: A trainer that is a new interpreter loads Leto before the script, not when that imports torch.
        faults: Faults to arm at the start, as JSON values of `faults.Fault`.
        needs_memory: State is retained (fit). Without it there are no managers and no shadows, and a failure starts the
            call again from its beginning.
        timings: Overrides of the supervisor's own waits, by name, in seconds (`processes.timings`); for tests.
    """

    job: str
    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    world: int
    call: int
    function: str
    devices: tuple[str, ...] = ()
    handle_bytes: int = HANDLE_BYTES
    root_dir: str | None = None
    script: Script | None = None
    shadows: int = 1
    zygote: bool = False
    zygote_modules: tuple[str, ...] = ()
    max_restarts: int = 20
    hang_timeout: float | None = None
    reap_timeout: float = 30.0
    stop_grace: float = 8.0
    loggers: tuple[dict[str, Any], ...] = ()
    files: tuple[str, ...] = ()
    rerun_first: bool = False
    faults: tuple[dict[str, Any], ...] = ()
    needs_memory: bool = True
    timings: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.world < 1 or self.shadows not in (0, 1) or self.max_restarts < 1 or not self.argv:
            raise ProtocolError("a launch needs a command, world >= 1, shadows 0 or 1 and max_restarts >= 1")
        if not self.job.isalnum():
            raise ProtocolError(f"the job's name must be letters and digits, got {self.job!r}")
        if self.reap_timeout <= 0 or self.stop_grace < 0 or (self.hang_timeout is not None and self.hang_timeout <= 0):
            raise ProtocolError("timeouts must be greater than 0")
        if self.devices and len(self.devices) != self.world:
            raise ProtocolError(f"{len(self.devices)} devices for {self.world} ranks")
        if wrong := [device for device in self.devices if _DEVICE.fullmatch(device) is None]:
            raise ProtocolError(f"a rank's device is 'cpu' or 'cuda:N', got {wrong[0][:40]!r}")
        if len({device.partition(":")[0] for device in self.devices}) > 1:
            raise ProtocolError("the ranks of a job are all on the CPU or all on GPUs")
        if self.rerun_first and self.script is None:
            raise ProtocolError("what is to be run again must be a script")

    @property
    def gpus(self) -> tuple[int, ...]:
        """Torch's numbers of the GPUs that the job uses, each once, in order; empty on the CPU."""
        return tuple(sorted({int(device[5:]) for device in self.devices if device != "cpu"}))

    def to_json(self) -> dict[str, Any]:
        """The frame that the launcher sends first."""
        return {"op": "launch", **asdict(self)}

    @classmethod
    def from_json(cls, frame: dict[str, Any]) -> "LaunchSpec":
        """Inverse of `to_json`.

        Raises:
            ProtocolError: a field is missing, unknown or of the wrong type.
        """
        if frame.get("op") != "launch":
            raise ProtocolError("the first frame of the launcher is not its launch")
        names = set(cls.__dataclass_fields__)
        if unknown := set(frame) - names - {"op"}:
            raise ProtocolError(f"a launch has no field {sorted(unknown)[0]!r}")
        env = get(frame, "env", dict)
        if not all(isinstance(key, str) and isinstance(value, str) for key, value in env.items()):
            raise ProtocolError("env must map strings to strings")
        script = frame.get("script")
        faults = tuple(checked(fault, dict, "faults") for fault in get(frame, "faults", list, []))
        try:
            for fault in faults:
                Fault(**fault)
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"a planned fault is wrong: {error}") from None
        Timings.with_overrides(get(frame, "timings", dict, {}))
        return cls(
            job=get(frame, "job", str),
            argv=tuple(_strings(frame, "argv")),
            env=env,
            cwd=get(frame, "cwd", str),
            world=get(frame, "world", int),
            call=get(frame, "call", int),
            function=get(frame, "function", str),
            devices=tuple(_strings(frame, "devices", ())),
            handle_bytes=get(frame, "handle_bytes", int, HANDLE_BYTES),
            root_dir=get(frame, "root_dir", str, None),
            script=None if script is None else Script.from_json(script),
            shadows=get(frame, "shadows", int, 1),
            zygote=get(frame, "zygote", bool, False),
            zygote_modules=tuple(_strings(frame, "zygote_modules", ())),
            max_restarts=get(frame, "max_restarts", int, 20),
            hang_timeout=get(frame, "hang_timeout", float, None),
            reap_timeout=get(frame, "reap_timeout", float, 30.0),
            stop_grace=get(frame, "stop_grace", float, 8.0),
            loggers=tuple(checked(logger, dict, "loggers") for logger in get(frame, "loggers", list, [])),
            files=tuple(_strings(frame, "files", ())),
            rerun_first=get(frame, "rerun_first", bool, False),
            faults=faults,
            needs_memory=get(frame, "needs_memory", bool, True),
            timings=get(frame, "timings", dict, {}),
        )


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a child ended: with an exit code, or by a signal.

    Args:
        exit_code: The code, None where a signal ended it.
        signum: The signal, None where it exited.
    """

    exit_code: int | None
    signum: int | None

    @classmethod
    def of(cls, result: os.waitid_result) -> "ExitStatus":
        """The status in what `os.waitid` returned."""
        if result.si_code == os.CLD_EXITED:
            return cls(result.si_status, None)
        return cls(None, result.si_status)

    def __str__(self) -> str:
        return f"exit {self.exit_code}" if self.signum is None else signal_name(self.signum)


@dataclass(frozen=True, slots=True)
class SignalRequest:
    """Launcher: the user's process received this signal."""

    signum: int


@dataclass(frozen=True, slots=True)
class Suspend:
    """Launcher: stop all trainers and clocks."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Launcher: go on."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Trainer: at the gate, everything is prepared."""


@dataclass(frozen=True, slots=True)
class Entered:
    """Trainer: entered the first forward that was not yet done, of `step`."""

    step: int


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """Trainer: an exception ended the call; it waits for what to do. `kind` is one of `REPORT_KINDS`."""

    kind: str
    type: str
    message: str
    traceback: str
    step: int | None


@dataclass(frozen=True, slots=True)
class Finished:
    """Trainer: the call has returned, results are written; it waits for the others."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """Trainer: its exception hooks have run and the exception is written."""


LauncherMessage = SignalRequest | Suspend | Resume
TrainerMessage = Ready | Entered | ErrorReport | Finished | Delivered


def parse_launcher_message(frame: dict[str, Any]) -> LauncherMessage:
    """Return the message of a frame that came after the launch.

    Raises:
        ProtocolError: no such message.
    """
    match frame.get("op"):
        case "signal":
            signum = get(frame, "signum", int)
            if signum not in signal.valid_signals():
                raise ProtocolError(f"no signal {signum}")
            return SignalRequest(signum)
        case "suspend":
            return Suspend()
        case "resume":
            return Resume()
        case other:
            raise ProtocolError(f"the launcher says {str(other)[:40]!r}")


def parse_trainer_message(frame: dict[str, Any]) -> TrainerMessage:
    """Return the message of a trainer's frame.

    Raises:
        ProtocolError: no such message, or a field of it is wrong.
    """
    match frame.get("op"):
        case "ready":
            return Ready()
        case "entered":
            return Entered(get(frame, "step", int))
        case "finished":
            return Finished()
        case "delivered":
            return Delivered()
        case "error":
            kind = get(frame, "kind", str)
            if kind not in REPORT_KINDS:
                raise ProtocolError(f"no error kind {kind[:40]!r}")
            return ErrorReport(
                kind=kind,
                type=get(frame, "type", str, "")[:TEXT_MAX],
                message=get(frame, "message", str, "")[:TEXT_MAX],
                traceback=get(frame, "traceback", str, "")[:TEXT_MAX],
                step=get(frame, "step", int, None),
            )
        case other:
            raise ProtocolError(f"a trainer says {str(other)[:40]!r}")


_MISSING = object()


def get(frame: dict[str, Any], name: str, kind: type, default: Any = _MISSING) -> Any:
    """Return a field of a frame, checked for its type; `default` where it is missing or null.

    Raises:
        ProtocolError: missing without a default, or of another type.
    """
    value = frame.get(name)
    if value is None:
        if default is _MISSING:
            raise ProtocolError(f"field {name!r} is missing")
        return default
    return checked(value, kind, name)


def checked(value: Any, kind: type, name: str) -> Any:
    """Return `value` if it is of the JSON type `kind`; an int is a float too, a bool is neither.

    Raises:
        ProtocolError: it is not.
    """
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ProtocolError(f"field {name!r} must be {kind.__name__}, got {type(value).__name__}")
    return value


def _strings(frame: dict[str, Any], name: str, default: Any = _MISSING) -> list[str]:
    values = get(frame, name, list, default)
    return [checked(value, str, name) for value in values]
