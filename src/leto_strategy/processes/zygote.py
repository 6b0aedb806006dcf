"""The zygote: imports torch and Lightning once, then forks trainers that run the user's script as if started anew.

It holds no CUDA context and no threads of its own, never runs any of the user's script itself, and ends with the
supervisor. A trainer is forked twice, so that the supervisor, which adopts orphans, becomes its parent. What to import
is told at run time: this module itself loads nothing but the standard library.
"""

import ctypes
import fcntl
import gc
import importlib
import importlib.machinery
import io
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
import types
import warnings
from datetime import timedelta

from leto_strategy.autoload import autoload
from leto_strategy.beginnings import seed_anew
from leto_strategy.config import note_process_start
from leto_strategy.errors import ProtocolError
from leto_strategy.memory.wire import FrameConnection
from leto_strategy.processes.messages import Script, get
from leto_strategy.processes.stub import PR_SET_PDEATHSIG

_ADOPTION_SECONDS_MAX = 5.0
_A_DAY = timedelta(days=1)
_WITH_OPENBLAS = ("numpy", "scipy.linalg")
_SAFE_AT_FORK = ("jemalloc_bg_thd",)  # jemalloc, as in pyarrow, prepares for a fork
_FLAVOURS = ("lightning", "pytorch_lightning")


def main(control_fd: int, supervisor_pid: int) -> None:
    """Serve until the supervisor says "bye" or is gone; in a forked child, run the user's script and return.

    The supervisor's first frame is {"op": "configure", "script", "argv", "cwd", "modules"}, answered by {"op": "ready"}
    or {"op": "refused", "reason"}; then each {"op": "fork", "id", "env", "fds"} with descriptors is answered by
    {"op": "forked", "id", "pid"}. ``fds`` lists the numbers that the descriptors get in the child.
    """
    connection = FrameConnection(socket.socket(fileno=control_fd))
    try:
        frame = connection.receive_one(timeout=_A_DAY).message
        script = Script.from_json(frame["script"])
        if script.path0 and not sys.flags.safe_path:
            sys.path[0] = script.path0
        threads_max = _import(tuple(frame["modules"]))
        _settle(connection, threads_max)
        env = _serve(connection, supervisor_pid, threads_max)
    except (EOFError, OSError, ProtocolError):
        os._exit(0)
    os.environ.clear()
    os.environ.update(env)
    autoload()
    os.chdir(frame["cwd"])
    _start(script, frame["argv"])


def rerun() -> None:
    """In a new interpreter, run the script that the last argument describes.

    Leto is loaded before the script's first line, which may start Hydra, or print, ahead of `import torch`.
    """
    frame = json.loads(sys.argv[-1])
    _start(Script.from_json(frame["script"]), frame["argv"])


def _start(script: Script, argv: list[str]) -> None:
    sys.orig_argv[:] = argv
    sys.argv[:] = list(script.argv)
    note_process_start()
    run_script(script)


def run_script(script: Script) -> None:
    """Run a script or module as ``__main__``, with everything it can look at as in a new interpreter.

    Returns when the script has ended; ends the process as the interpreter would after an exception.
    """
    main_module = types.ModuleType("__main__")
    main_module.__dict__.update(__builtins__=__builtins__, __annotations__={}, __spec__=None)
    sys.modules["__main__"] = main_module
    importlib.invalidate_caches()
    if script.path0 and not sys.flags.safe_path:
        sys.path[0] = script.path0
    try:
        if script.module is not None:
            sys.argv[:] = ["-m", *script.argv[1:]]
            runpy._run_module_as_main(script.module)  # type: ignore[attr-defined]
        else:
            assert script.path is not None
            sys.argv[:] = list(script.argv)
            path = os.path.abspath(script.path)
            main_module.__dict__.update(
                __file__=path, __cached__=None, __loader__=importlib.machinery.SourceFileLoader("__main__", path)
            )
            with io.open_code(path) as file:
                code = compile(file.read(), path, "exec", dont_inherit=True)
            exec(code, main_module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        _end_with(error)


def _end_with(error: BaseException) -> None:
    """Print an exception and end as the interpreter does, without the frames of this module."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    if isinstance(error, KeyboardInterrupt):
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    raise SystemExit(1)


def _import(modules: tuple[str, ...]) -> int:
    """Import `modules`; return how many threads may be there at a fork.

    numpy and scipy come first: each starts threads of an OpenBLAS of its own, which stops them itself before a fork.
    What an import makes stays: the collector, which would look through it again and again for a fifth of the time,
    waits for `_settle`.
    """
    threads_max = 1
    gc.disable()
    for name in (*_WITH_OPENBLAS, *modules):
        try:
            importlib.import_module(name)
        except ImportError:
            continue  # what can't be imported here is imported, and explained, by the script
        if name in _WITH_OPENBLAS:
            threads_max = len(_native_threads())
    return threads_max


def _native_threads() -> list[str]:
    """Names of this process's threads, without those that are known to be safe at a fork."""
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as file:
                names.append(file.read().strip())
        except FileNotFoundError:
            continue  # it has just ended
    return [name for name in names if name not in _SAFE_AT_FORK]


def _settle(connection: FrameConnection, threads_max: int) -> None:
    """Say whether forking is safe."""
    if (reason := _unsafe(threads_max)) is not None:
        connection.send({"op": "refused", "reason": reason}, timeout=timedelta(seconds=5))
        raise EOFError(reason)
    # What is alive now lives as long as the process: keep the collector from touching, and so copying, its pages.
    gc.collect()
    gc.freeze()
    gc.enable()
    connection.send({"op": "ready"}, timeout=timedelta(seconds=5))


def _unsafe(threads_max: int) -> str | None:
    """Return why a fork could break the child, None where it can't."""
    if threading.active_count() > 1:
        return f"an imported module has started threads: {[thread.name for thread in threading.enumerate()][1:]}"
    if len(names := _native_threads()) > threads_max:
        return f"an imported package has started native threads: {', '.join(names)}"
    return None


def _serve(connection: FrameConnection, supervisor_pid: int, threads_max: int) -> dict[str, str]:
    """Fork at each request; returns the environment to use, in a child only."""
    while True:
        frame, fds = connection.receive_one(timeout=_A_DAY)
        if frame.get("op") != "fork":
            raise EOFError("bye")
        number, targets = get(frame, "id", int), get(frame, "fds", list)
        env: dict[str, str] = get(frame, "env", dict)
        if (reason := _unsafe(threads_max)) is not None:
            connection.send({"op": "refused", "reason": reason}, timeout=timedelta(seconds=5))
            raise EOFError(reason)
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of OpenBLAS's threads
            pid = _fork_twice()
        if pid == 0:
            connection.close()
            _become_trainer(supervisor_pid, fds, targets)
            return env
        for fd in fds:
            os.close(fd)
        connection.send({"op": "forked", "id": number, "pid": pid}, timeout=timedelta(seconds=5))


def _fork_twice() -> int:
    """Fork a grandchild; return its pid here and 0 in it. The child between them has ended when this returns here."""
    read, write = os.pipe()
    middle = os.fork()
    if middle == 0:
        pid = os.fork()
        if pid == 0:
            os.close(read)
            os.close(write)
            return 0
        os.write(write, str(pid).encode())
        os._exit(0)
    os.close(write)
    text = os.read(read, 32)
    os.close(read)
    os.waitpid(middle, 0)
    if not text:
        raise EOFError("the fork failed")
    return int(text)


def _become_trainer(supervisor_pid: int, fds: list[int], targets: list[int]) -> None:
    """Lead a session, end with the supervisor, hold the descriptors at their numbers, share no random state."""
    os.setsid()
    deadline = time.monotonic() + _ADOPTION_SECONDS_MAX
    while os.getppid() != supervisor_pid:  # until the child between us and it is reaped
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0002)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != supervisor_pid:
        os._exit(1)
    _place(fds, targets)
    seed_anew()


def _place(fds: list[int], targets: list[int]) -> None:
    """Move descriptors to their numbers. First all go above every number in question: none is overwritten."""
    above = max([*fds, *targets]) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, target in zip(moved, targets, strict=True):
        os.dup2(fd, target, inheritable=True)
        os.close(fd)
