"""A process is killed inside an update, another resumes from the words, and memory is what it would have been.

State and words lie in shared memory. Each victim is a forked child that kills itself with SIGKILL, so that nothing of
it runs afterwards; what a survivor knows is what is in that memory and what records would hold.
"""

import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from leto_strategy.progress import Marker, Phase
from update.rig import Build, Rig, bytes_of, random_gradients

STEP = 5
POINTS = (
    "chunk_before_undo",
    "chunk_undo_copied",
    "chunk_undo_marked",
    "chunk_updating",
    "chunk_updated",
    "chunk_committed",
    "update_done",
)
Reached = tuple[str, int]


def small_model() -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    module = nn.Module()
    for index, shape in enumerate(((300,), (20, 9), (7,), (3, 3, 5), (11,))):
        module.register_parameter(f"p{index}", nn.Parameter(torch.randn(shape, generator=generator)))
    return module


def adamw() -> tuple[nn.Module, Optimizer]:
    module = small_model()
    return module, AdamW(module.parameters(), lr=0.1, amsgrad=True)


def whole_tensors() -> tuple[nn.Module, Optimizer]:
    module = small_model().bfloat16()
    return module, Adam(module.parameters(), lr=0.1, weight_decay=0.1)


def sgd_first_update() -> tuple[nn.Module, Optimizer]:
    module = small_model()
    return module, SGD(module.parameters(), lr=0.1, momentum=0.9, nesterov=True)


CASES = {"adamw": (adamw, 3000), "whole_tensors": (whole_tensors, 900), "sgd_first_update": (sgd_first_update, 1000)}


class Trial:
    """One rig in shared memory, put back to the moment before the update of `STEP` for each trial."""

    def __init__(self, build: Build, chunk_bytes: int, *, warm: bool = True) -> None:
        self.reached: list[Reached] = []
        self.act: Callable[[str, int], None] = lambda point, chunk: None
        self.rig = Rig(build, chunk_bytes=chunk_bytes, reach=self._reach)
        if warm:
            self.rig.set_gradients(random_gradients(self.rig.module, 0))
            self.rig.update(0)
        self.rig.set_gradients(random_gradients(self.rig.module, 1))
        self.rig.touched[1] = False
        self.before = {name: tensor.clone() for name, tensor in self._tensors().items()}
        self.steps = list(self.rig.steps)
        self.reached.clear()
        self.rig.page.publish(Marker(STEP, Phase.SYNCED))
        self.run()
        self.path = tuple(self.reached)
        self.expected = self.rig.content()
        assert self.expected != self._content_of(self.before)

    def reset(self) -> None:
        for name, tensor in self._tensors().items():
            tensor.copy_(self.before[name])
        self.rig.state.undo().fill_(0xA5)
        self.rig.page.rewrite(Marker(STEP, Phase.SYNCED))

    def run(self) -> list[float]:
        """What a promoted trainer does: everything it needs comes from records and the page."""
        self.reached.clear()
        return self.rig.updater.run(
            STEP,
            groups=self.rig.optimizer.param_groups,
            steps_before=self.steps,
            touched=self.rig.touched,
            resume=self.rig.page.marker,
        )

    def kill_at(self, place: Reached) -> None:
        def act(point: str, chunk: int) -> None:
            if (point, chunk) == place:
                os.kill(os.getpid(), signal.SIGKILL)

        self.in_child(lambda: self._run_with(act), signal.SIGKILL)

    def resume_in_another_process(self) -> None:
        self.in_child(lambda: self._run_with(lambda point, chunk: None), 0)
        assert self.rig.page.marker == Marker(STEP, Phase.DONE)
        assert self.rig.content() == self.expected

    def in_child(self, work: Callable[[], Any], expected: int) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                work()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        assert ended == expected, f"the child ended with {ended}, expected {expected}"

    def path_from_here(self) -> tuple[Reached, ...]:
        """Return what a resume would reach, without leaving a trace: a child does it to its own copy of the words."""
        read, write = os.pipe()

        class Enough(BaseException):
            pass

        def work() -> None:
            def act(point: str, chunk: int) -> None:
                os.write(write, f"{point} {chunk}\n".encode())
                if len(self.reached) == 5:
                    raise Enough

            try:
                self._run_with(act)
            except Enough:
                pass

        saved = {name: tensor.clone() for name, tensor in self._tensors().items()}
        undo, marker = self.rig.state.undo().clone(), self.rig.page.marker
        self.in_child(work, 0)
        os.close(write)
        with os.fdopen(read) as file:
            lines = file.read().split("\n")
        for name, tensor in self._tensors().items():
            tensor.copy_(saved[name])
        self.rig.state.undo().copy_(undo)
        self.rig.page.rewrite(marker)
        return tuple((line.split()[0], int(line.split()[1])) for line in lines if line)

    def _run_with(self, act: Callable[[str, int], None]) -> None:
        torch.set_num_threads(1)
        self.act = act
        self.run()

    def _reach(self, point: str, step: int, chunk: int) -> None:
        self.reached.append((point, chunk))
        self.act(point, chunk)

    def _tensors(self) -> dict[str, torch.Tensor]:
        state = self.rig.state
        found = {}
        for slot in self.rig.layout.slots:
            found[slot.name] = state.parameter(slot)
            found |= {f"{slot.name}.{name}": tensor for name, tensor in state.moments(slot).items()}
        return found

    def _content_of(self, tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
        return {name: bytes_of(tensor) for name, tensor in tensors.items()}


@pytest.fixture(params=list(CASES), scope="module")
def trial(request: pytest.FixtureRequest) -> Trial:
    build, chunk_bytes = CASES[request.param]
    return Trial(build, chunk_bytes, warm=request.param != "sgd_first_update")


def test_every_point_of_every_chunk_is_reached(trial: Trial) -> None:
    num_chunks = len(trial.rig.layout.chunks)
    assert num_chunks >= 3
    assert {chunk for _, chunk in trial.path} == set(range(num_chunks))
    assert {point for point, _ in trial.path} == set(POINTS)
    assert trial.path[-1] == ("update_done", num_chunks - 1)


def test_sigkill_at_every_point_of_every_chunk_then_resume_elsewhere(trial: Trial) -> None:
    for place in trial.path:
        trial.reset()
        trial.kill_at(place)
        trial.resume_in_another_process()


def test_a_second_sigkill_at_every_point_that_the_resume_reaches_first(trial: Trial) -> None:
    for place in trial.path[::4]:
        trial.reset()
        trial.kill_at(place)
        for again in trial.path_from_here():
            trial.reset()
            trial.kill_at(place)
            trial.kill_at(again)
            trial.resume_in_another_process()


def test_a_chunk_killed_while_updating_is_really_torn(trial: Trial) -> None:
    places = [place for place in trial.path if place[0] == "chunk_updating"]
    assert places
    for place in places:
        trial.reset()
        trial.kill_at(place)
        pieces = trial.rig.updater._chunks[place[1]]
        torn = [data.clone() for data in pieces.data]
        assert any(not torch.equal(old, now) for old, now in zip(pieces.saved, torn, strict=True)), "nothing written"
        assert trial.rig.page.marker == Marker(STEP, Phase.UNDO, place[1])
        trial.resume_in_another_process()
        assert any(not torch.equal(new, now) for new, now in zip(pieces.data, torn, strict=True)), "all was written"


class _KillBefore(TorchDispatchMode):
    """Kills the process just before its nth operation that writes to one of its arguments."""

    def __init__(self, nth: int) -> None:
        super().__init__()
        self.left = nth

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1
        return func(*args, **(kwargs or {}))


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num_writes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_writes += bool(func._schema.is_mutable)
        return func(*args, **(kwargs or {}))


def test_sigkill_between_any_two_writing_operations_then_resume_elsewhere(trial: Trial) -> None:
    trial.reset()
    with _Count() as counted:
        trial.run()
    assert counted.num_writes > 20
    for nth in range(counted.num_writes):

        def die(nth: int = nth) -> None:
            with _KillBefore(nth):
                trial.run()

        trial.reset()
        trial.in_child(die, signal.SIGKILL)
        trial.resume_in_another_process()


def test_a_resumed_update_returns_the_step_counts_of_a_whole_one(trial: Trial) -> None:
    trial.reset()
    whole = trial.run()
    assert trial.run() == whole  # DONE: nothing left to do
    for place in trial.path[::5]:
        trial.reset()
        trial.kill_at(place)
        assert trial.run() == whole


@settings(max_examples=8, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_sequence_of_kills_ends_where_no_kill_does(trial: Trial, data: st.DataObject, seed: int) -> None:
    note(f"seed {seed}")
    trial.reset()
    for _ in range(data.draw(st.integers(1, 6), label="kills")):
        place = data.draw(st.sampled_from(trial.path), label="kill at")
        remaining = trial.path_from_here() if trial.rig.page.marker != Marker(STEP, Phase.SYNCED) else trial.path
        if place in remaining:
            trial.kill_at(place)
    trial.resume_in_another_process()
