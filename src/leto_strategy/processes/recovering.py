"""Answers the failure of an active trainer: fence, words, decision, promotion (rules R3, R5, R15).

The decision is made here by a pure function of what the managers' mirrors show, and applied here too; with several
nodes the first half moves to one of them and the second stays. Nothing here waits: each stage ends where the loop takes
over.
"""

import time
from collections.abc import Callable

from leto_strategy.faults import Fault
from leto_strategy.processes.generation import Generation, TrainerProcess, has_text
from leto_strategy.processes.job import Job
from leto_strategy.processes.loop import Timer
from leto_strategy.processes.messages import Entered
from leto_strategy.processes.record import RecoveryRecord
from leto_strategy.processes.watchdog import Watchdog
from leto_strategy.recovery.budget import Budget, Failure
from leto_strategy.recovery.classification import Ending, Meaning, Origin, classify
from leto_strategy.recovery.decision import Decision, Mode, decide, ready_step
from leto_strategy.recovery.operability import why_not_operable

_FRESH = Decision(Mode.FRESH, 0, "nothing was begun yet")
_FIRST_STEP_LOOKS_SECONDS = 0.004


class Recoverer:
    """Starts and promotes active generations, and replaces them when they fail.

    Args:
        job: The job.
        watchdog: Told when a generation begins.
        give_up: Ends the job as "failed" with a reason for the user.
    """

    def __init__(self, job: Job, watchdog: Watchdog, *, give_up: Callable[[str], None]) -> None:
        self._job = job
        self._watchdog = watchdog
        self._give_up = give_up
        self._budget = Budget(max_restarts=job.spec.max_restarts)
        self._decision = _FRESH
        self._record: RecoveryRecord | None = None
        self._failure: Failure | None = None
        self._dead: Generation | None = None
        self._first_step_timer: Timer | None = None
        self._fired_ns = [0] * job.spec.world
        self._faults = [Fault(**fault) for fault in job.spec.faults]
        self._known_fault: tuple[int, int] | None = None

    def start_first(self) -> None:
        """Start the job's first generation."""
        self._job.active = self._job.launcher.start("active")

    def note_fault(self, rank: int, now_ns: int) -> None:
        """A fault was done to a rank from outside by us, just now: the next failure of it began then."""
        self._known_fault = (rank, now_ns)

    # From the gate into new work.

    def on_ready(self, generation: Generation) -> None:
        """A trainer of the active generation waits at its gate."""
        if not generation.promoted and generation.all_ready and not self._job.suspended and not self._job.ending:
            self._promote(generation)

    def on_resumed(self) -> None:
        """The job goes on after a suspension: do what was put off."""
        if self._dead is not None:
            dead, self._dead = self._dead, None
            self._go_on(dead)
        elif self._job.active is not None:
            self.on_ready(self._job.active)

    def _promote(self, generation: Generation) -> None:
        job, decision, record = self._job, self._decision, self._record
        generation.promoted = True
        if generation.ready_seconds is None:
            generation.ready_seconds = job.loop.now() - generation.started
            self._watchdog.note_start(generation.ready_seconds)
        job.managers.prepare_pages(generation.number)
        faults, self._faults = self._faults, []
        for fault in faults if job.spec.needs_memory else ():
            try:
                job.managers.arm(fault)
            except ValueError as error:
                job.events.emit("warning", text=f"a planned fault is not armed: {error}")
        self._fired_ns = [job.managers.fired_ns(rank) for rank in range(job.spec.world)]
        if record is not None:
            record.promoted_ns = time.monotonic_ns()
            record.generation = generation.number
        generation.say(
            "promote",
            mode=decision.mode.value,
            step=decision.step,
            recovery=0 if record is None else record.number,
            values_from=decision.values_from,
        )
        self._watchdog.restart()
        job.watch_trainers()
        job.events.emit(
            "promoted",
            generation=generation.number,
            pids=generation.pids,
            mode=decision.mode.value,
            step=decision.step,
            reason=decision.reason,
        )

    def on_entered(self, trainer: TrainerProcess, message: Entered | None) -> None:
        """An active trainer is in new work: in its first new forward, or past the end."""
        if message is not None:
            trainer.entered_step = message.step
        generation, record = self._job.active, self._record
        if generation is None or not generation.all_started_step or generation.first_step_seen:
            return
        generation.first_step_seen = True
        steps = [trainer.entered_step for trainer in generation if trainer.entered_step is not None]
        self._job.events.emit("entered", generation=generation.number, step=min(steps, default=None))
        if self._job.devices is not None:
            self._job.devices.on_entered(generation.pids)
        if record is not None:
            pages = [self._job.managers.page(rank) for rank in range(self._job.spec.world)]
            record.entered_ns = max((page.entered_ns for page in pages if page), default=0) or time.monotonic_ns()
            record.completed = True
            there = [page for page in pages if page]
            record.pages_rebuilt = sum(page.pages_rebuilt for page in there)
            record.localise_us = max((page.localise_us for page in there), default=0)
            record.rebuild_us = max((page.rebuild_us for page in there), default=0)
            self._record = None
            self._watch_first_step(record, generation, self._job.loop.now() + self._job.timings.first_step)
        self._job.shadows.want()

    def _watch_first_step(self, record: RecoveryRecord, generation: Generation, deadline: float) -> None:
        """Look for READY of the first new step, only to report how long it took; nothing is decided by it."""
        ready = self._ready_step()
        over = generation.all_finished or self._job.active is not generation or self._job.loop.now() > deadline
        if ready >= self._first_new_step():
            record.ready_ns = time.monotonic_ns()
        elif not over and self._job.spec.needs_memory:
            self._first_step_timer = self._job.loop.after(
                _FIRST_STEP_LOOKS_SECONDS, lambda: self._watch_first_step(record, generation, deadline)
            )
            return
        self._report(record)

    # From a failure to the next generation.

    def fail(self, trainer: TrainerProcess, ending: Ending, meaning: Meaning | None = None) -> None:
        """An active trainer failed: kill its generation, now, and bring the next one."""
        job, generation = self._job, self._job.active
        assert generation is not None, "behind a fence nobody can fail"
        assert trainer in generation.trainers
        now_ns = time.monotonic_ns()
        meaning = meaning or classify(ending)
        job.active = None
        job.end_generation(
            generation,
            unknown_too=True,
            on_gone=lambda num_processes: self._on_fenced(generation, num_processes),
            on_stuck=lambda what: self._give_up(
                f"{what} within {job.spec.reap_timeout:g} s (LetoStrategy(reap_timeout=...)): they are of the failed "
                "trainers and may still write to the training state. Usually a device or a file system hangs: check "
                "dmesg"
            ),
            await_gone=None if job.devices is None else job.devices.await_gone,
        )
        job.shadows.prepare()
        step = self._step_of(generation, trainer)
        self._failure = Failure(trainer.rank, step, meaning.cause, meaning.origin is Origin.INTERNAL, meaning.text)
        if self._record is None or generation.promoted:
            self._report_unfinished()
            number = len(job.recoveries) + 1
            fault_ns = self._fault_ns(trainer.rank, now_ns)
            self._record = RecoveryRecord(number, meaning.cause, trainer.rank, step, fault_ns, now_ns)
            job.recoveries.append(self._record)
        if generation.role == "shadow" and not generation.promoted:
            trainer.keep_log = has_text(trainer.log)
        report = None if trainer.report is None else trainer.report.traceback
        job.events.emit(
            "trainer_failed",
            rank=trainer.rank,
            pid=trainer.pid,
            generation=generation.number,
            step=step,
            cause=meaning.cause,
            origin=meaning.origin.value,
            text=meaning.text,
            report=report,
        )

    def _on_fenced(self, generation: Generation, num_processes: int) -> None:
        record = self._record
        assert record is not None
        if not record.fenced_ns:
            record.fenced_ns = time.monotonic_ns()
        if self._job.devices is not None:
            record.health = {
                item.device: {"before": item.before.to_json(), "after": item.after.to_json()}
                for item in self._job.devices.evidence()
            }
        if self._job.suspended:
            self._dead = generation
        else:
            self._go_on(generation)
        milliseconds = round((record.fenced_ns - record.detected_ns) / 1e6, 3)
        self._job.events.emit(
            "fenced", generation=generation.number, num_processes=num_processes, milliseconds=milliseconds
        )

    def _go_on(self, dead: Generation) -> None:
        """Behind the fence: read, decide, lower, and hand over to the next generation."""
        job, record, failure = self._job, self._record, self._failure
        assert record is not None
        assert failure is not None
        if job.ending:
            return
        if (complaint := self._why_not_operable()) is not None:
            self._give_up(
                f"training can't go on in place after rank {failure.rank} {failure.text}: {complaint}. Look at "
                "nvidia-smi -q and dmesg, then start the script again from your last checkpoint with "
                'fit(ckpt_path="last"), on another GPU if need be'
            )
            return
        ready = self._ready_step()
        reason = self._budget.spend(failure, ready_step=ready)
        if reason is not None:
            self._give_up(reason)
            return
        self._decision = decide(job.managers.views()) if job.spec.needs_memory else _FRESH
        if not record.decided_ns:
            record.decided_ns = time.monotonic_ns()
            record.steps_repeated = self._steps_repeated(dead)
        if self._decision.mode is Mode.FALLBACK:
            self._give_up(
                f"the training state can't be continued exactly after rank {failure.rank} {failure.text}: "
                f"{self._decision.reason}. Load the weights of your last checkpoint with load_from_checkpoint, "
                "or resume it under strategy='ddp'"
            )
            return
        job.managers.lower(self._decision)
        record.mode = self._decision.mode.value
        generation = job.shadows.take()
        record.level = "cold" if generation is None else "shadow"
        job.active = generation or job.launcher.start("active")
        self.on_ready(job.active)

    def _why_not_operable(self) -> str | None:
        """What is wrong with a GPU of the job; None where nothing is, or where there is none."""
        devices = self._job.devices
        if devices is None:
            return None
        complaint = why_not_operable(devices.evidence())
        if complaint is None:
            devices.on_recovered()
        return complaint

    # What the words and pages say. Only `views` is believed, and only behind the fence.

    def _ready_step(self) -> int:
        pages = [self._job.managers.page(rank) for rank in range(self._job.spec.world)]
        return min((ready_step(page.marker) if page else -1 for page in pages), default=-1)

    def _first_new_step(self) -> int:
        return self._decision.step + (self._decision.mode is Mode.FINISH)

    def _step_of(self, generation: Generation, trainer: TrainerProcess) -> int | None:
        """The step a trainer was in, or was to enter again; None before its first."""
        if trainer.report is not None and trainer.report.step is not None:
            return trainer.report.step
        page = self._job.managers.page(trainer.rank)
        if trainer.entered_step is not None:
            return None if page is None else page.step
        return self._decision.step if generation.promoted and self._decision.mode is not Mode.FRESH else None

    def _steps_repeated(self, dead: Generation) -> int:
        """1 where the forward that comes next had been begun by any rank, else 0."""
        begun = [
            page.step
            for trainer in dead
            if trainer.entered_step is not None and (page := self._job.managers.page(trainer.rank)) is not None
        ]
        return int(max(begun, default=-1) >= self._first_new_step())

    def _fault_ns(self, rank: int, now_ns: int) -> int:
        """When the fault happened, where an injector said so."""
        known, self._known_fault = self._known_fault, None
        if known is not None and known[0] == rank:
            return known[1]
        fired = self._job.managers.fired_ns(rank)
        return fired if fired > self._fired_ns[rank] else now_ns

    # Reporting.

    def close(self) -> None:
        """The job ends: write the records that wait for something."""
        self._report_unfinished()

    def _report_unfinished(self) -> None:
        if self._first_step_timer is not None:
            self._first_step_timer.cancel()
        for record in self._job.recoveries:
            self._report(record)

    def _report(self, record: RecoveryRecord) -> None:
        if not record.reported:
            record.reported = True
            self._job.events.emit("recovered", **record.to_json())
