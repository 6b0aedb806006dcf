"""One row, one test: what each ending of a trainer means."""

import signal

import pytest

from leto_strategy.recovery.classification import REPORT_KINDS, Ending, Origin, Reaction, classify, signal_name

RECOVER, RAISE, WAIT = Reaction.RECOVER, Reaction.RAISE, Reaction.WAIT
EXTERNAL, INTERNAL, USER = Origin.EXTERNAL, Origin.INTERNAL, Origin.USER


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU])
def test_a_signal_from_outside_says_nothing_about_the_step(signum):
    meaning = classify(Ending(signum=signum))
    assert (meaning.cause, meaning.origin, meaning.reaction) == (signum.name, EXTERNAL, RECOVER)


@pytest.mark.parametrize(
    "signum",
    [signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS],
)
def test_a_signal_from_inside_may_come_back(signum):
    meaning = classify(Ending(signum=signum))
    assert (meaning.cause, meaning.origin, meaning.reaction) == (signum.name, INTERNAL, RECOVER)
    assert signum.name in meaning.text


def test_a_bus_error_names_its_usual_reason():
    assert "/dev/shm" in classify(Ending(signum=signal.SIGBUS)).text


def test_exit_0_without_a_result_is_a_failure():
    meaning = classify(Ending(exit_code=0))
    assert (meaning.cause, meaning.origin, meaning.reaction) == ("exit 0", INTERNAL, RECOVER)


def test_another_exit_code_is_a_failure():
    meaning = classify(Ending(exit_code=3))
    assert (meaning.cause, meaning.origin, meaning.reaction) == ("exit 3", INTERNAL, RECOVER)


@pytest.mark.parametrize(
    ("kind", "origin", "reaction"),
    [
        ("exception", USER, RAISE),
        ("keyboard_interrupt", USER, RAISE),
        ("system_exit", USER, RAISE),
        ("sigterm", EXTERNAL, RECOVER),
        ("worker_killed", INTERNAL, RECOVER),
        ("communicator", INTERNAL, WAIT),
        ("device", INTERNAL, RECOVER),
        ("out_of_memory", INTERNAL, RECOVER),
    ],
)
def test_a_report_means(kind, origin, reaction):
    meaning = classify(Ending(report=kind))
    assert (meaning.origin, meaning.reaction) == (origin, reaction)


def test_every_kind_of_report_has_a_row():
    assert all(classify(Ending(report=kind)).text for kind in REPORT_KINDS)
    assert len(REPORT_KINDS) == 8


def test_sigterm_is_the_users_wish_once_it_was_forwarded():
    meaning = classify(Ending(report="sigterm"), stopping=True)
    assert (meaning.origin, meaning.reaction) == (USER, RAISE)


@pytest.mark.parametrize("kind", sorted(set(REPORT_KINDS) - {"sigterm"}))
def test_stopping_changes_no_other_row(kind):
    assert classify(Ending(report=kind), stopping=True) == classify(Ending(report=kind))


def test_a_hang_may_come_back():
    meaning = classify(Ending(hang=True))
    assert (meaning.cause, meaning.origin, meaning.reaction) == ("hang", INTERNAL, RECOVER)


def test_a_lost_connection_may_come_back():
    meaning = classify(Ending(disconnected=True))
    assert (meaning.cause, meaning.origin, meaning.reaction) == ("disconnected", INTERNAL, RECOVER)


def test_signals_without_a_name_have_one():
    assert signal_name(9) == "SIGKILL"
    assert signal_name(40) == "signal 40"
