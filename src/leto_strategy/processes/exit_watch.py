"""Sees early that an active trainer on a GPU is exiting, so that its shadow prepares while the driver takes its time.

A killed process is reaped a tenth of a second and more after its kill: until then the driver gives back what it had.
Nothing is decided here: the failure counts when the process is reaped.
"""

from leto_strategy.processes.job import Job
from leto_strategy.system import is_exiting


class ExitWatch:
    """Looks at the active trainers.

    Args:
        job: The job. Does nothing where it has no GPUs.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._told = -1  # the generation whose exit was told last

    def start(self) -> None:
        """Look from now on."""
        if self._job.spec.gpus and self._job.spec.shadows:
            self._look()

    def _look(self) -> None:
        job = self._job
        job.loop.after(job.timings.exits, self._look)
        generation = job.active
        if generation is None or generation.number == self._told or not generation.promoted or job.ending:
            return
        if any(is_exiting(pid) for pid in generation.pids) and not generation.all_finished:
            self._told = generation.number
            job.shadows.prepare()
