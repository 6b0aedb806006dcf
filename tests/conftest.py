"""What every test gets: a seed that is printed, a guard against things left behind, and reasons for what is skipped.

The guard compares the process before and after each test: environment, threads, child processes (orphans included),
file descriptors and /dev/shm. A fixture of module or session scope is set up before and torn down after it, so what
such a fixture holds is no leak.
"""

import gc
import os
import random
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

with pytest.MonkeyPatch.context() as patch:
    # Triton fixes when it is imported whether its own functions run in its interpreter, as tests/triton_kernels needs
    # it; other libraries import it whenever they like.
    patch.setenv("TRITON_INTERPRET", "1")
    import triton.language  # noqa: F401

SESSION_VARIABLE = "PYTEST_LETO_SESSION"
"""In the environment of this process and so of all that tests start: finds orphans of tests again."""

DEVICE_VARIABLE = "LETO_TEST_DEVICE"
"""Where `tests/e2e/tiny.py` trains: "cpu", the default, or "cuda"."""

SETTLE_SECONDS = 2.0
"""How long what is on its way out may take to be gone."""

IGNORED_VARIABLES = {"PYTEST_CURRENT_TEST", "COLUMNS", "LINES", "KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK"}
IGNORED_PROCESSES = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")
IGNORED_FILES = ("/dev/null", "/dev/urandom", "/dev/random", "/proc/", "/sys/")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="also run the long plans (hours)")
    parser.addoption("--seed", type=int, default=None, help="seed of random plans; printed at the start, replays them")
    parser.addoption("--device", choices=("cpu", "cuda"), default=None, help="where tests/e2e/tiny.py trains")


def pytest_configure(config: pytest.Config) -> None:
    os.environ[SESSION_VARIABLE] = f"{os.getpid()}-{secrets.token_hex(4)}"
    if config.getoption("--device") is not None:
        os.environ[DEVICE_VARIABLE] = config.getoption("--device")
    if config.getoption("--seed") is None:
        workers = getattr(config, "workerinput", {})  # pytest-xdist: all workers use the controller's seed
        config.option.seed = workers.get("leto_seed", secrets.randbelow(2**31))


class _SeedForWorkers:
    @staticmethod
    def pytest_configure_node(node: object) -> None:
        node.workerinput["leto_seed"] = node.config.option.seed  # type: ignore[attr-defined]


def pytest_plugin_registered(plugin: object, manager: pytest.PytestPluginManager) -> None:
    if type(plugin).__name__ == "DSession" and not manager.has_plugin("leto-seed"):
        manager.register(_SeedForWorkers(), "leto-seed")


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.option.seed} (replay with --seed {config.option.seed})"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip_nightly = pytest.mark.skip(reason="nightly: run `make nightly`, or pytest --nightly")
    skip_gpu = pytest.mark.skip(reason="gpu: there is no CUDA GPU here")
    has_gpu = Path("/dev/nvidiactl").exists()
    for item in items:
        if "nightly" in item.keywords and not config.getoption("--nightly"):
            item.add_marker(skip_nightly)
        if (
            item.get_closest_marker("gpu") and not has_gpu
        ):  # "gpu" is a keyword of all that lies in a folder of that name
            item.add_marker(skip_gpu)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.failed:
        report.sections.append(("seed", f"--seed {item.config.option.seed}"))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The run's seed; the same for all tests of a run."""
    return int(request.config.option.seed)


@pytest.fixture
def rng(request: pytest.FixtureRequest, seed: int) -> random.Random:
    """A generator of this test's own: the same numbers whatever ran before it."""
    return random.Random(f"{seed}:{request.node.nodeid}")


# --- leaks


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in IGNORED_VARIABLES}


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.is_alive()}


def _files() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the listing's own
            continue
        if not target.startswith(IGNORED_FILES):
            found[int(name)] = target
    return found


def _shared_memory() -> set[str]:
    try:
        return set(os.listdir("/dev/shm"))
    except FileNotFoundError:
        return set()


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # the process has ended
        return b""


def _processes() -> dict[int, str]:
    """Children of this process and everything that carries the session's variable, zombies included."""
    mark = f"{SESSION_VARIABLE}={os.environ.get(SESSION_VARIABLE, '?')}".encode()
    me = os.getpid()
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == me:
            continue
        stat = _read(f"/proc/{name}/stat").rpartition(b")")[2].split()
        if not stat or (int(stat[1]) != me and mark not in _read(f"/proc/{name}/environ").split(b"\0")):
            continue
        command = _read(f"/proc/{name}/cmdline").replace(b"\0", b" ").strip()
        if not any(ignored in command for ignored in IGNORED_PROCESSES):
            found[int(name)] = f"{command.decode(errors='replace')[:200]} (state {stat[0].decode()})"
    return found


def _settled(look: Callable[[], list[str]]) -> list[str]:
    """What `look` still finds after `SETTLE_SECONDS`; returns at once when it finds nothing."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while (left := look()) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    return left


@pytest.fixture(scope="session", autouse=True)
def _backward_once() -> None:
    """The first backward pass of a CUDA build of torch opens the driver's descriptors, whichever test runs it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is not None:
        torch.ones(1, requires_grad=True).sum().backward()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves something behind; `@pytest.mark.leaks("fds")` allows kinds, with a comment why."""
    allowed: set[str] = set()
    for mark in request.node.iter_markers("leaks"):
        allowed.update(mark.args)
    environment, threads, processes = _environment(), _threads(), _processes()
    files, shared_memory = _files(), _shared_memory()

    yield

    def new_threads() -> list[str]:
        return [thread.name for thread in _threads() - threads]

    def new_processes() -> list[str]:
        return [f"{pid} {what}" for pid, what in _processes().items() if pid not in processes]

    def new_files() -> list[str]:
        return [f"{fd} -> {target}" for fd, target in _files().items() if files.get(fd) != target]

    def new_shared_memory() -> list[str]:
        return sorted(_shared_memory() - shared_memory)

    def changed_environment() -> list[str]:
        now = _environment()
        return sorted(name for name in environment.keys() | now.keys() if environment.get(name) != now.get(name))

    looks = {
        "env": changed_environment,
        "threads": new_threads,
        "processes": new_processes,
        "fds": new_files,
        "shm": new_shared_memory,
    }
    leaks = {kind: left for kind, look in looks.items() if kind not in allowed and (left := _settled(look))}
    # The next test starts clean, whatever this one left.
    for pid in _processes().keys() - processes.keys() if "processes" in leaks else ():
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
    if "env" in leaks:
        for name in leaks["env"]:
            if name in environment:
                os.environ[name] = environment[name]
            else:
                os.environ.pop(name, None)
    if leaks:
        lines = [f"  {kind}: {what}" for kind, left in leaks.items() for what in left]
        pytest.fail("the test left behind\n" + "\n".join(lines), pytrace=False)
