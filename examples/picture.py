"""The demo's picture: the loss of the killed run on top of the undisturbed one, and what each kill cost in time."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INK, KILLED, QUIET, FAILURE, FINE = "#1f2933", "#0b6e8f", "#b9d9e6", "#c8321f", "#6b7683"


@dataclass(frozen=True)
class Failure:
    """A failure as it is marked.

    Args:
        step: Step in which it happened.
        text: What happened, in few words.
        milliseconds: Recovery time, None where it is unknown.
    """

    step: int
    text: str
    milliseconds: float | None


@dataclass(frozen=True)
class Curve:
    """One run.

    Args:
        name: For the legend.
        losses: Mean over the ranks, in nats a byte, by step.
        step_ms: Time between the ends of neighbouring steps in milliseconds; nan for the first.
    """

    name: str
    losses: Sequence[float]
    step_ms: Sequence[float]


def draw(path: Path, killed: Curve, quiet: Curve, failures: Sequence[Failure], *, verdict: str, good: bool) -> None:
    """Write the picture as PNG.

    Args:
        path: The file.
        killed: The run with failures.
        quiet: The undisturbed run.
        failures: Where to put marks.
        verdict: The headline.
        good: False puts it in red.

    Raises:
        ImportError: matplotlib is not there.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    style: Any = {"font.size": 10.5, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": FINE}
    style |= {"text.color": INK, "axes.labelcolor": INK, "xtick.color": FINE, "ytick.color": FINE}
    with pyplot.rc_context(style):
        figure, (top, bottom) = pyplot.subplots(
            2, 1, figsize=(10, 6.4), dpi=150, sharex=True, height_ratios=[3, 1.15], layout="constrained"
        )
        figure.suptitle(verdict, x=0.015, ha="left", fontsize=14, fontweight="bold", color=INK if good else FAILURE)
        _draw_losses(top, killed, quiet, failures)
        _draw_times(bottom, killed, quiet, failures)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        pyplot.close(figure)


def _draw_losses(axes: Any, killed: Curve, quiet: Curve, failures: Sequence[Failure]) -> None:
    axes.plot(quiet.losses, color=QUIET, linewidth=7, solid_capstyle="round", label=quiet.name)
    axes.plot(killed.losses, color=KILLED, linewidth=1.4, label=killed.name)
    low, high = min(killed.losses + quiet.losses), max(killed.losses + quiet.losses)  # type: ignore[operator]
    span, last = high - low, len(quiet.losses) - 1
    for number, failure in enumerate(failures):
        loss = killed.losses[min(failure.step, len(killed.losses) - 1)]
        axes.axvline(failure.step, color=FAILURE, linewidth=0.8, alpha=0.35)
        axes.plot([failure.step], [loss], "X", color=FAILURE, markeredgecolor="white", markersize=11, zorder=5)
        took = "" if failure.milliseconds is None else f"\nback in {failure.milliseconds:.0f} ms"
        near_end = failure.step > 0.9 * last
        axes.annotate(
            failure.text + took,
            (failure.step, loss),
            (-7 if near_end else 7, (26, 74)[number % 2]),  # neighbours at two heights
            textcoords="offset points",
            ha="right" if near_end else "left",
            fontsize=9,
            color=FAILURE,
            linespacing=1.35,
        )
    axes.set_ylim(low - 0.06 * span, high + 0.08 * span)
    axes.set_ylabel("loss (nats a byte)")
    axes.legend(loc="upper center", fontsize=10, ncols=2, facecolor="white", edgecolor="none", framealpha=1)


def _draw_times(axes: Any, killed: Curve, quiet: Curve, failures: Sequence[Failure]) -> None:
    axes.plot(quiet.step_ms, color=QUIET, linewidth=3)
    axes.plot(killed.step_ms, color=KILLED, linewidth=1.2)
    for failure in failures:
        axes.axvline(failure.step, color=FAILURE, linewidth=0.8, alpha=0.35)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("ms a step")
    axes.set_xlabel("step")
