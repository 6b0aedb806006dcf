"""`leto run`: starts a script under Leto that does not name a strategy. The script itself is not changed."""

import os
import sys
from collections.abc import Sequence
from importlib import metadata

from leto_strategy.context import mark_program


def run(arguments: Sequence[str]) -> int:
    """Execute the interpreter with a script, in place of this process.

    Args:
        arguments: `script.py` or `-m module`, then the script's own arguments.

    Raises:
        ValueError: There is no script, or torch is told not to load Leto.
    """
    command = list(arguments)
    module = command[:1] == ["-m"]
    if not command[int(module) :]:
        raise ValueError("name a script: leto run train.py, or leto run -m package.train")
    if not module and command[0].startswith("-"):
        raise ValueError(f"{command[0]} is no option of it; what follows the script goes to the script")
    if not module and not os.path.exists(command[0]):
        raise ValueError(f"there is no file {command[0]}")
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        raise ValueError("TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading Leto; unset it")
    if not any(point.name == "leto" for point in metadata.entry_points(group="torch.backends")):
        raise ValueError(f"Leto is not installed for {sys.executable}; run: pip install leto-strategy")
    sys.stdout.flush()
    sys.stderr.flush()
    mark_program()
    os.execv(sys.executable, [sys.executable, *command])
