"""tqdm, which opens bars even where none is shown, must leave no thread behind."""

import tqdm

tqdm.std.tqdm.monitor_interval = 0
