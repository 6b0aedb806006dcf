"""First program of a trainer: arms the parent-death signal and checks the parent before anything else is imported.

Run as ``python -I -S stub.py PARENT_PID CWD PROGRAM ARGUMENT...``. It makes the process the leader of a session of its
own, then becomes the program. Standard library only and nothing of ours, so that it costs milliseconds.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Prepare this process and execute the program; never returns."""
    parent, cwd, program = int(argv[1]), argv[2], argv[3:]
    if os.getsid(0) != os.getpid():
        os.setsid()
    # Armed first, compared after: a parent that dies in between either sends the signal or is seen to be gone.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)
    try:
        os.chdir(cwd)
        os.execvp(program[0], program)
    except OSError as error:
        print(f"leto: can't start {program[0]!r} in {cwd!r}: {error}", file=sys.stderr, flush=True)
        os._exit(127)


if __name__ == "__main__":
    main(sys.argv)
