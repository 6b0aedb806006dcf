"""A script that writes down what it can see of its own start. Usage: FACTS_FILE=... python facts.py [raise|exit N]."""

import json
import multiprocessing
import os
import pickle
import random
import sys
import threading


class Something:
    def __init__(self, value):
        self.value = value


def double(item):
    return Something(2 * item.value), os.getpid(), __name__


def in_child(method):
    with multiprocessing.get_context(method).Pool(1) as pool:
        result, pid, name = pool.apply(double, (Something(21),))
    return [result.value, pid != os.getpid(), name]


def facts():
    spec = globals()["__spec__"]
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv[1:],
        "name": __name__,
        "file": __file__,
        "package": __package__,
        "spec": None if spec is None else spec.name,
        "path": sys.path,
        "cwd": os.getcwd(),
        "main": sys.modules["__main__"].__dict__ is globals(),
        "globals": sorted(name for name in globals() if name.startswith("__")),
        "loader": type(__loader__).__name__,
        "optimize": sys.flags.optimize,
        "dev_mode": sys.flags.dev_mode,
        "pickled": pickle.loads(pickle.dumps(Something(3))).value,
        "class": f"{Something.__module__}.{Something.__qualname__}",
        "spawn": in_child("spawn"),
        "fork": in_child("fork"),
        "threads": threading.active_count(),
        "stdin": sys.stdin.read(),
        "environ": {k: v for k, v in os.environ.items() if k != "FACTS_FILE"},
        "fds": sorted(fd for fd in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{fd}")),
        "session": os.getsid(0) == os.getpid(),
    }


if __name__ == "__main__":
    first = random.random()
    numpy = sys.modules.get("numpy")
    drawn = [first, None if numpy is None else float(numpy.random.random())]
    with open(os.environ["FACTS_FILE"], "w") as file:
        json.dump([facts(), drawn], file)
    print("to stdout")
    print("to stderr", file=sys.stderr)
    if sys.argv[1:2] == ["raise"]:
        raise LookupError("uncaught")
    if sys.argv[1:2] == ["exit"]:
        sys.exit(int(sys.argv[2]))
    if sys.argv[1:2] == ["interrupt"]:
        raise KeyboardInterrupt
