"""Tells the path to a violation, one line per store, with the numbers that the ranks had at the start."""

from collections.abc import Sequence

from explore import model
from explore.model import Host, Rank, Stream


def tell(states: Sequence[tuple[list[Rank], int]]) -> list[str]:
    """Return one line per transition of a path; each state is its ranks in any order, and the kills left."""
    ranks, kills = list(states[0][0]), states[0][1]
    lines: list[str] = []
    for after, kills_after in states[1:]:
        ranks_after = _same_order(ranks, after)
        changed = [i for i, (old, new) in enumerate(zip(ranks, ranks_after, strict=True)) if old != new]
        if kills_after < kills:
            words = ", ".join(_word(rank) for rank in ranks)
            lines.append(f"*** a rank is killed; the words are {words}")
        if any(rank.decision is not None and rank.host is Host.DEAD for rank in ranks_after) and len(changed) > 1:
            decision = ranks_after[0].decision
            assert decision is not None
            lines.append(f"*** all are dead; the decision is {decision.mode.value} at step {decision.step}")
        elif len(changed) > 1:
            lines.append("*** the next generation is promoted")
        elif kills_after == kills:
            lines += [f"rank {i} {_move(ranks[i], ranks_after[i])}" for i in changed]
        ranks, kills = ranks_after, kills_after
    return [f"{number:4d} {line}" for number, line in enumerate(lines, 1)]


def _word(rank: Rank) -> str:
    return "nothing" if rank.word is None else str(rank.word)


def _same_order(before: list[Rank], after: list[Rank]) -> list[Rank]:
    """Give each rank its successor: the same state, else the same retained memory, else what is left."""
    left = list(after)
    order: list[Rank | None] = [None] * len(before)
    for likeness in (_itself, _memory, _anything):
        for index, rank in enumerate(before):
            match = next((other for other in left if likeness(other) == likeness(rank)), None)
            if order[index] is None and match is not None:
                order[index] = match
                left.remove(match)
    return [rank for rank in order if rank is not None]


def _itself(rank: Rank) -> object:
    return rank


def _memory(rank: Rank) -> object:
    corpse = model.killed(rank)
    return corpse.word, corpse.chunks, corpse.start_host, corpse.mid_host, corpse.used


def _anything(rank: Rank) -> object:
    return None


def _move(old: Rank, new: Rank) -> str:
    match old.host:
        case Host.DEAD:
            return f"    its word {_word(old)} is lowered to {_word(new)}"
        case Host.ENTER:
            return f"    re-enters with the word {_word(old)}"
        case _ if (old.host_step, old.host) != (new.host_step, new.host):
            return f"    host: {old.host.name}({old.host_step})"
        case _ if old.stream < Stream.SYNCED:
            return f"        stream: {old.stream.name}({old.step}), word {_word(new)}"
        case _:
            return f"        stream: {old.stream.name}({old.step}, {old.chunk}), word {_word(new)}, chunks {new.chunks}"
