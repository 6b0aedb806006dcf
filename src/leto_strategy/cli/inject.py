"""`leto inject`: makes a trainer of a running job fail, at once or at a point of a step."""

import difflib
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from leto_strategy.cli import jobs
from leto_strategy.faults import LOSSES, POINTS

ANSWER_TIMEOUT = timedelta(seconds=5)
FIRST_POINT_OF_A_STEP = "forward"


@dataclass(frozen=True)
class Injection:
    """What is to happen.

    Args:
        rank: Rank of the trainer.
        fault: "kill" (SIGKILL), "hang" (it never goes on), "stop" (SIGSTOP), "page-loss" or "host-page-loss" (pages
            are destroyed, then SIGKILL).
        at_step: Step at which it happens; None: the first time the point is reached.
        point: A key of `faults.POINTS`; None: at once, or just before a forward where `at_step` is given or the fault
            is "hang", which only the trainer itself can do.
        pages: Pages that each protection group loses, of the state, or with "host-page-loss" of parity in host memory.
        group: The group that loses pages; None: every one.
        role: Which process of the rank: "active", "shadow" or "manager". Only an active trainer passes points.
    """

    rank: int
    fault: str
    at_step: int | None = None
    point: str | None = None
    role: str = "active"
    pages: int | None = None
    group: int | None = None

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"--rank {self.rank}: ranks count from 0")
        if self.at_step is not None and self.at_step < 0:
            raise ValueError(f"--at-step {self.at_step}: steps count from 0")
        if self.point is not None and self.point not in POINTS:
            near = difflib.get_close_matches(self.point, POINTS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"--point {self.point!r}: {hint}`leto inject --list-points` shows all points")

        if self.fault not in LOSSES and (self.pages is not None or self.group is not None):
            raise ValueError(f"--pages and --group belong to --fault {' or '.join(LOSSES)}")
        if self.pages is not None and self.pages < 1:
            raise ValueError(f"--pages {self.pages}: at least 1")
        if self.group is not None and self.group < 0:
            raise ValueError(f"--group {self.group}: protection groups count from 0")
        by_itself = ("hang", *LOSSES)
        if self.role != "active" and (self.fault in by_itself or self.at_step is not None or self.point is not None):
            raise ValueError(f"--role {self.role}: only --fault kill or stop, with no --at-step and no --point")

    def request(self) -> dict[str, Any]:
        """The message to the supervisor."""
        message = {"op": "inject", **asdict(self)}
        if self.fault not in LOSSES:
            del message["pages"], message["group"]
        if self.point is None and (self.at_step is not None or self.fault in ("hang", *LOSSES)):
            message["point"] = FIRST_POINT_OF_A_STEP
        return message

    def sentence(self) -> str:
        """What will happen, for the user."""
        process = f"the {self.role}{' trainer' if self.role != 'manager' else ''} of rank {self.rank}"
        point = self.request()["point"]
        if self.fault in LOSSES:
            what = "host parity" if self.fault == "host-page-loss" else "data"
            where = "each protection group" if self.group is None else f"protection group {self.group}"
            process = f"{process}, which loses {self.pages or 1} {what} page(s) of {where},"
        if point is None:
            return f"{self.fault} {process}, now"
        when = f" of step {self.at_step}" if self.at_step is not None else ", the next time it is reached"
        return f"{self.fault} {process} at {point!r}{when}"


def run(injection: Injection, *, job: str | None) -> int:
    """Send the injection and say what was armed; returns 1 if the job refused it.

    Raises:
        jobs.JobNotFound: no job fits.
        jobs.JobUnreachable: the job does not answer, or refuses.
    """
    name = jobs.choose_job(jobs.find_jobs(), job)
    answer = jobs.ask(name, injection.request(), timeout=ANSWER_TIMEOUT)
    if not answer.get("ok"):
        raise jobs.JobUnreachable(f"job {name} refused: {answer.get('error') or answer}")
    print(f"job {name}: {injection.sentence()}")
    return 0


def list_points() -> int:
    """Print the documented points."""
    width = max(map(len, POINTS))
    for name, meaning in POINTS.items():
        print(f"{name:<{width}}  {meaning}")
    return 0
