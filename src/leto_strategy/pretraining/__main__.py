"""`python -m leto_strategy.pretraining` is what `leto train` runs, and what Lightning and Leto start again in ranks."""

import os
import sys

from leto_strategy.pretraining.app import main

try:
    main()
    sys.stdout.flush()
except BrokenPipeError:  # `leto train --help | head`; the interpreter must not stumble over it again when it flushes
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
