"""Every reachable state of small jobs, under the functions that the supervisor calls: no promise is ever broken."""

from dataclasses import fields

import pytest

from explore.model import Scenario
from explore.search import Result, Search
from leto_strategy.recovery.decision import NUM_SLOTS, Mode

EVERY_BEGINNING = {Mode.FRESH, Mode.REDO, Mode.FINISH}


def explore(scenario: Scenario, capsys: pytest.CaptureFixture[str], states_max: int = 4_000_000) -> Result:
    result = Search(scenario).run(states_max)
    with capsys.disabled():
        told = [
            f"{f.name}={getattr(scenario, f.name)}" for f in fields(scenario) if getattr(scenario, f.name) != f.default
        ]
        print(f"\n  {', '.join(told)}: {result}")
    assert result.violation is None, str(result)
    assert result.ends > 0
    assert result.modes >= EVERY_BEGINNING, "the scenario does not reach every way to begin"
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(Scenario(ranks=1, steps=5, chunks=2, slots=NUM_SLOTS, kills=4), id="1 rank, 4 kills"),
        pytest.param(Scenario(ranks=2, steps=3, chunks=2, slots=3, kills=3), id="2 ranks, 3 kills"),
        pytest.param(Scenario(ranks=2, steps=5, chunks=1, slots=NUM_SLOTS, kills=2), id="2 ranks, the ring wraps"),
        pytest.param(Scenario(ranks=2, steps=4, chunks=1, slots=2, kills=2), id="2 ranks, fewest slots"),
        pytest.param(Scenario(ranks=2, steps=3, kills=2, skipped=frozenset({0})), id="first step skipped"),
        pytest.param(Scenario(ranks=2, steps=4, kills=2, skipped=frozenset({1, 2})), id="two steps skipped in a row"),
        pytest.param(Scenario(ranks=2, steps=3, kills=2, skipped=frozenset({2})), id="last step skipped"),
        pytest.param(Scenario(ranks=2, steps=2, kills=3, values=True), id="values of the synchronisation, 3 kills"),
        pytest.param(Scenario(ranks=3, steps=2, chunks=1, slots=3, kills=1), id="3 ranks"),
        pytest.param(Scenario(ranks=3, steps=1, chunks=1, slots=2, kills=2), id="3 ranks, 2 kills"),
        pytest.param(Scenario(ranks=3, steps=2, chunks=1, slots=2, kills=1, values=True), id="3 ranks with values"),
        pytest.param(
            Scenario(ranks=3, steps=3, chunks=1, slots=2, kills=1, skipped=frozenset({1})), id="3 ranks, skip"
        ),
    ],
)
def test_nothing_is_lost_repeated_or_torn_and_nobody_waits_for_ever(
    scenario: Scenario, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explore(scenario, capsys).fallbacks == 0


@pytest.mark.slow
@pytest.mark.parametrize("values", [False, True])
def test_lost_gradients_are_made_again_or_fall_back_only_when_the_update_has_begun(
    values: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = Scenario(ranks=2, steps=2, chunks=2, kills=3, gradient_losses=2, values=values)
    assert explore(scenario, capsys).fallbacks > 0


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(Scenario(ranks=2, steps=5, chunks=2, slots=NUM_SLOTS, kills=2), id="2 ranks, the ring wraps"),
        pytest.param(Scenario(ranks=2, steps=3, chunks=3, slots=3, kills=4, values=True), id="2 ranks, 4 kills"),
        pytest.param(Scenario(ranks=3, steps=2, chunks=1, slots=2, kills=2), id="3 ranks, 2 steps, 2 kills"),
        pytest.param(Scenario(ranks=3, steps=3, chunks=1, slots=3, kills=1), id="3 ranks, 3 steps"),
        pytest.param(Scenario(ranks=4, steps=1, chunks=1, slots=2, kills=2), id="4 ranks, 1 step"),
    ],
)
def test_larger_jobs_keep_every_promise(scenario: Scenario, capsys: pytest.CaptureFixture[str]) -> None:
    explore(scenario, capsys, states_max=60_000_000)
