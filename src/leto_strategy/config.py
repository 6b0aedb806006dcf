"""What a user can set, and what a trainer is told. The only place that reads the environment variables of Leto."""

import difflib
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from leto_strategy.errors import ConfigurationError

JOB_VARIABLE = "LETO_JOB"
TRAINER_VARIABLE = "LETO_TRAINER"


@dataclass(frozen=True)
class ProcessStart:
    """How this process was started, as far as it can be told when torch is imported: a script may change all of it.

    Args:
        cwd: Working directory.
        flags: What stands between the interpreter and the script on the command line, but for `-m`.
        argv: `sys.argv`; its first is no more than a placeholder where the script was started by `-m`.
        environ: Environment.
    """

    cwd: str
    flags: tuple[str, ...]
    argv: tuple[str, ...]
    environ: dict[str, str]


_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_OPTIONS = re.compile(r"-(?P<plain>[a-zA-Z?]*?)(?P<last>[mcWX])(?P<rest>.*)")


def split_command(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split a command line of the interpreter into its options, without `-m`, and what its script sees as sys.argv."""
    flags: list[str] = []
    place = 1
    while place < len(words) and words[place].startswith("-") and words[place] != "-":
        word = words[place]
        match = None if word.startswith("--") else _OPTIONS.match(word)
        if match is not None and match["last"] in "mc":
            if match["plain"]:
                flags.append(f"-{match['plain']}")
            return tuple(flags), ("-m", *words[place + (1 if match["rest"] else 2) :])
        has_value = word in _WITH_VALUE or (match is not None and not match["rest"])
        flags += words[place : place + 1 + has_value]
        place += 1 + has_value
    return tuple(flags), tuple(words[place:]) or ("",)


def _first_directory(script: str) -> str:
    """The working directory in which this program was started, where what it is called tells; else the present one."""
    main = sys.modules.get("__main__")
    path, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if path is not None and os.path.isabs(path):
        if spec is None and path.endswith(f"/{script}"):
            return str(path.removesuffix(script))
        root = path.rsplit("/", spec.name.count(".") + 1)[0] if spec is not None else None
        if root is not None and sys.path and sys.path[0] == root:
            return str(root)
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed
        return "/"


def _now(environ: dict[str, str]) -> ProcessStart:
    flags, argv = split_command(sys.orig_argv)
    return ProcessStart(_first_directory(argv[0]), flags, argv, environ)


def _first_environment() -> dict[str, str]:
    """The environment that this program was executed with: the script may have changed it before torch is there."""
    try:
        with open("/proc/self/environ", "rb") as file:
            entries = [os.fsdecode(entry).partition("=") for entry in file.read().split(b"\0")]
    except OSError:
        return dict(os.environ)
    return {name: value for name, separator, value in entries if name and separator}


_start = _now(_first_environment())


def process_start() -> ProcessStart:
    """How this process was started."""
    return _start


def note_process_start() -> None:
    """In a forked process that is about to run a script: it starts now."""
    global _start
    _start = _now(dict(os.environ))


def scratch_directory(job: str) -> str:
    """Directory for what multiprocessing leaves on disk in a job's trainers; removed when the job is over."""
    return os.path.join(os.environ.get("TMPDIR") or "/tmp", f"leto-{job}")


@dataclass(frozen=True)
class LetoConfig:
    """Options of `LetoStrategy`; each is a keyword of the strategy and a field of `conf/strategy/leto.yaml`.

    Args:
        shadows: Shadow trainers per rank, 1 or 0. With 0 a failure is answered with a cold start on retained memory.
        hang_timeout: Seconds without progress after which a trainer counts as hung; None: ten times the longest
            time seen in the same activity, at least 30 s, and 30 min before it was seen once.
        max_restarts: Failures in a row without one finished gradient computation after which Leto gives up.
        reap_timeout: Seconds to wait for killed processes to be gone before the failure counts as fatal.
        stop_grace: Seconds between a forwarded SIGINT or SIGTERM and SIGKILL.
        zygote: Fork trainers from a process that has imported torch and Lightning already: "auto" (wherever the
            script can be run again that way), "on", or "off" (every trainer starts a new interpreter).
        updater: How an optimizer step survives a failure: "transactional" (in place, for one Adam, AdamW or SGD),
            "sync_snapshot" (any optimizers: a copy of the whole state after every step), or "auto": the first where it
            is exact, else the second, with one line said.
        chunk_bytes: Bytes of state per chunk of the update transaction; None: 4 to 32 chunks a rank.
        protection: Whether lost memory pages of parameters and optimizer state are rebuilt from parity: "off" or "on".
            Needs the transactional updater; not available on a GPU yet.
        page_kib: Size in KiB of a page, the unit of loss: a power of two from 4 to 2048.
        protection_pages: Data pages of a protection group at most.
        parity_pages: Parity pages of a group in host memory, 1 to 64: so many lost pages of a group can be rebuilt.
        parity_pages_second: Parity pages over those, 1 to 64: so many lost ones of them cost nothing.
        handle_mib: On a GPU, the size in MiB of one piece of protected memory, a multiple of 2: what is lost at once
            when a page goes bad. Smaller pieces take longer to attach, and to give back at each failure.
        warm_up: On a GPU, let shadows run the kernels of the first step once, with shapes of that step and made-up
            values, so that they are loaded when a shadow takes over. Nothing of your code runs for it.
        bucket_cap_mb: Size of a gradient bucket in MiB, as in DistributedDataParallel.
        find_unused_parameters: As in DistributedDataParallel: parameters that take no part in a step are skipped.
        faults: Planned faults for tests and drills, see `leto_strategy.faults`.
    """

    shadows: int = 1
    hang_timeout: float | None = None
    max_restarts: int = 20
    reap_timeout: float = 30.0
    stop_grace: float = 8.0
    zygote: str = "auto"
    updater: str = "auto"
    chunk_bytes: int | None = None
    protection: str = "off"
    page_kib: int = 2048
    protection_pages: int = 1024
    parity_pages: int = 16
    parity_pages_second: int = 1
    handle_mib: int = 32
    warm_up: bool = True
    bucket_cap_mb: float = 25.0
    find_unused_parameters: bool = False
    faults: tuple[dict[str, Any], ...] = field(default=())

    def __post_init__(self) -> None:
        if self.shadows not in (0, 1) or isinstance(self.shadows, bool):
            raise ConfigurationError(f"LetoStrategy(shadows={self.shadows!r}): use 1, or 0 for no shadow trainers")
        bare: object = self.zygote
        if isinstance(bare, bool):  # what YAML and Hydra make of a bare `off`
            object.__setattr__(self, "zygote", "on" if bare else "off")
        if self.zygote not in ("auto", "on", "off"):
            raise ConfigurationError(f"LetoStrategy(zygote={self.zygote!r}): use 'auto', 'on' or 'off'")
        if self.updater not in ("auto", "transactional", "sync_snapshot"):
            raise ConfigurationError(
                f"LetoStrategy(updater={self.updater!r}): use 'auto', 'transactional' or 'sync_snapshot'"
            )
        self._check_protection()
        if not isinstance(self.warm_up, bool):
            raise ConfigurationError(f"LetoStrategy(warm_up={self.warm_up!r}): use True or False")
        if isinstance(self.handle_mib, bool) or not isinstance(self.handle_mib, int) or self.handle_mib % 2:
            raise ConfigurationError(f"LetoStrategy(handle_mib={self.handle_mib!r}): use a multiple of 2")
        for name in (
            "handle_mib",
            "hang_timeout",
            "max_restarts",
            "reap_timeout",
            "stop_grace",
            "chunk_bytes",
            "bucket_cap_mb",
        ):
            value = getattr(self, name)
            if value is None and name in ("hang_timeout", "chunk_bytes"):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                raise ConfigurationError(f"LetoStrategy({name}={value!r}): use a number greater than 0")

    def _check_protection(self) -> None:
        bare: object = self.protection
        if isinstance(bare, bool):  # what YAML and Hydra make of a bare `on`
            object.__setattr__(self, "protection", "on" if bare else "off")
        if self.protection not in ("on", "off"):
            raise ConfigurationError(f"LetoStrategy(protection={self.protection!r}): use 'on' or 'off'")
        if self.protection == "on" and self.updater == "sync_snapshot":
            raise ConfigurationError(
                "LetoStrategy(protection='on', updater='sync_snapshot'): only the transactional updater is protected; "
                "leave one of them out"
            )
        kib: object = self.page_kib
        if isinstance(kib, bool) or not isinstance(kib, int) or not 4 <= kib <= 2048 or kib & (kib - 1):
            raise ConfigurationError(f"LetoStrategy(page_kib={kib!r}): use a power of two from 4 to 2048")
        limits = {"protection_pages": 1 << 20, "parity_pages": 64, "parity_pages_second": 64}
        for name, limit in limits.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
                raise ConfigurationError(f"LetoStrategy({name}={value!r}): use a whole number from 1 to {limit}")

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """Names of all options."""
        return tuple(f.name for f in fields(cls))

    @classmethod
    def reject_unknown(cls, names: set[str], *, also: set[str]) -> None:
        """Raise `ConfigurationError` for the first of `names` that is neither an option nor in `also`."""
        known = set(cls.option_names()) | also
        for name in sorted(names - known):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" Options: {', '.join(cls.option_names())}."
            raise ConfigurationError(f"LetoStrategy has no option {name!r}.{hint}")


@dataclass(frozen=True)
class TrainerIdentity:
    """Who this trainer process is; written by the supervisor, read once, early.

    Args:
        job: Random name of the job.
        rank: Rank of this trainer, 0 <= rank < world.
        world: Number of ranks.
        generation: Number of the generation this trainer belongs to.
        role: "active" or "shadow" at its start; a shadow becomes active at its promotion.
        call: Index of the `fit`/`validate`/`test`/`predict` call of the script that this trainer runs.
        function: Name of that call.
        control_fd: Socket to the supervisor.
        result_fd: memfd for the result of this call.
        prior_result_fds: memfds with the results of the script's earlier calls.
        manager_address: Abstract address of this rank's state manager, "" where no memory is retained.
        store_port: Port of the generation's rendezvous store on 127.0.0.1.
        store_fd: Rank 0: socket that already listens on that port, else -1.
        stdout_fd: The user's standard output.
        stderr_fd: The user's standard error.
        loggers: What the user's process has fixed of each logger: its kind, its version and the like.
        files: Further descriptors, by name; see `leto_strategy.context`.
    """

    job: str
    rank: int
    world: int
    generation: int
    role: str
    call: int
    function: str
    control_fd: int
    result_fd: int
    prior_result_fds: tuple[int, ...]
    manager_address: str
    store_port: int
    store_fd: int
    stdout_fd: int
    stderr_fd: int
    loggers: tuple[dict[str, Any], ...] = ()
    files: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        """The value of `LETO_TRAINER`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "TrainerIdentity":
        """Inverse of `to_json`; unknown keys are a bug of ours and raise TypeError."""
        values = json.loads(text)
        for name in ("prior_result_fds", "loggers"):
            values[name] = tuple(values.get(name, ()))
        return cls(**values)


_identity: TrainerIdentity | None = None


def trainer_identity() -> TrainerIdentity | None:
    """This process's identity, or None in a process that is no trainer.

    The variable leaves `os.environ` at the first call, so that processes which the user's script starts are not taken
    for trainers; `LETO_JOB` stays, the fence finds stray children by it.
    """
    global _identity
    if _identity is None and (text := os.environ.pop(TRAINER_VARIABLE, None)) is not None:
        _identity = TrainerIdentity.from_json(text)
    return _identity


def is_imported_by_worker() -> bool:
    """Whether the script is being run because `multiprocessing` has spawned a process, such as a DataLoader worker."""
    process: Any = sys.modules.get("multiprocessing.process")
    return process is not None and getattr(process.current_process(), "_inheriting", False)


def become_trainer() -> None:
    """In a trainer process, take the identity that the supervisor gave it and let Lightning see its rank.

    What the script prints on its way to the trainer's call has been printed by the user's process: it is dropped.
    Standard error stays, so that an error on the way is seen.
    """
    identity = trainer_identity()
    if identity is None:
        return
    if identity.role == "active":
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)
    set_rank_variables(identity)
    rank_zero: Any = sys.modules.get("lightning_utilities.core.rank_zero")
    if rank_zero is not None:  # imported before the rank was known: in a forked trainer
        rank_zero.rank_zero_only.rank = identity.rank


def set_rank_variables(identity: TrainerIdentity) -> None:
    """Let Lightning see which rank this trainer is."""
    os.environ["LOCAL_RANK"] = str(identity.rank)
    os.environ["NODE_RANK"] = "0"
    os.environ["WORLD_SIZE"] = str(identity.world)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(identity.store_port)
