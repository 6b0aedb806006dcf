"""Breadth-first search over all ranks of a job: every interleaving, a kill at every store, recovery step by step.

A state is one integer: the sorted ids of its ranks' states, and what is left of the kills. Four reductions, each sound:

* Ranks share nothing but the synchronisation and the recovery, so what one rank can do next is computed once per state
  of a rank.
* Ranks that are exchanged make the same state: no rule looks at rank numbers (test_decision checks that of ``decide``).
* One kill of the whole generation stands for "one rank dies, the others go on for a while, then the fence kills them":
  a dead rank is one that is not scheduled. Reading words *before* the fence is no such case; ``Scenario.fence``
  explores it.
* A kill that finds the same retained memory with the same kills left is followed once: recovery sees nothing else.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from explore import model, moves
from explore.model import Host, Rank, Rules, Scenario, Violation
from explore.story import tell
from leto_strategy.progress import Marker, Phase
from leto_strategy.recovery.decision import Decision, Mode

ID_BITS = 24
ID_MASK = (1 << ID_BITS) - 1


@dataclass(frozen=True)
class Rest:
    """What a state holds beside its ranks."""

    kills: int
    gradient_losses: int
    generation: int = 0
    early: Decision | None = None  # decided from words that were read before the fence


@dataclass
class Result:
    """What a search found."""

    states: int = 0
    transitions: int = 0
    recoveries: int = 0
    ends: int = 0
    fallbacks: int = 0
    seconds: float = 0.0
    modes: set[Mode] = field(default_factory=set)
    violation: str | None = None
    story: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        found = f"VIOLATION: {self.violation}" if self.violation else "no violation"
        counts = f"{self.states:,} states, {self.transitions:,} transitions, {self.recoveries:,} recoveries"
        return "\n".join([f"{counts}, {self.ends:,} ends, {self.seconds:.1f} s: {found}", *self.story])


class Search:
    """One search; :meth:`run` it once."""

    def __init__(self, scenario: Scenario, rules: Rules | None = None) -> None:
        self.scenario = scenario
        self.rules = rules or Rules()
        self.result = Result()
        self._ranks: list[Rank] = []
        self._ids: dict[Rank, int] = {}
        self._moves: list[tuple[int, ...] | None] = []
        self._arrived: list[int] = []
        self._waits: list[bool] = []
        self._corpses: list[int] = []
        self._rests: list[Rest] = []
        self._rest_ids: dict[Rest, int] = {}
        self._killed: set[int] = set()
        self._parents: dict[int, int] = {}

    def run(self, states_max: int = 20_000_000) -> Result:
        """Search everything, or up to the first (so shortest) violation."""
        began = time.monotonic()
        start = self._pack([self._id(model.first(self.scenario))] * self.scenario.ranks, self._start_rest())
        self._parents[start] = start
        frontier, state = [start], start
        try:
            while frontier:
                following: list[int] = []
                for state in frontier:
                    for successor in self._successors(state):
                        self.result.transitions += 1
                        if successor not in self._parents:
                            self._parents[successor] = state
                            following.append(successor)
                assert len(self._parents) <= states_max, f"more than {states_max} states: narrow the scenario"
                frontier = following
        except Violation as violation:
            self.result.violation = str(violation)
            path = [state]
            while self._parents[path[-1]] != path[-1]:
                path.append(self._parents[path[-1]])
            states = [self._unpack(state) for state in reversed(path)]
            self.result.story = tell([([self._ranks[i] for i in ids], self._rests[rest].kills) for ids, rest in states])
        self.result.states = len(self._parents)
        self.result.seconds = time.monotonic() - began
        return self.result

    def _successors(self, state: int) -> Iterator[int]:
        ids, rest_id = self._unpack(state)
        rest = self._rests[rest_id]
        alive = False
        synced = min(self._arrived[i] for i in ids)
        for index, rank_id in enumerate(ids):
            if index and rank_id == ids[index - 1]:
                continue
            following = self._moves[rank_id]
            if following is None:
                following = self._moves[rank_id] = self._compute_moves(self._ranks[rank_id])
            for after in following:
                alive = True
                yield self._replaced(ids, index, after, rest_id)
            if self._waits[rank_id] and synced >= self._arrived[rank_id]:
                alive = True
                after = self._id(moves.passed(self._ranks[rank_id], self.scenario, rest.generation))
                yield self._replaced(ids, index, after, rest_id)
        if self.scenario.values:
            self._check_values([self._ranks[i] for i in ids])
        if not alive:
            ranks = [self._ranks[i] for i in ids]
            if all(rank.host is Host.LOWERED for rank in ranks):  # the next generation is promoted
                yield self._pack([self._id(rank._replace(host=Host.ENTER)) for rank in ranks], rest_id)
            elif self._is_end(ranks):
                return
        yield from self._deaths(ids, rest)

    def _deaths(self, ids: list[int], rest: Rest) -> Iterator[int]:
        if rest.early is not None:  # the fence is passed only now
            corpses = [self._corpses[i] for i in ids]
            yield self._recovery(corpses, rest.early, Rest(rest.kills, rest.gradient_losses, rest.generation + 1))
            return
        if rest.kills == 0:
            return
        if not self.scenario.fence:
            decision = self.rules.decide([model.view(self._ranks[self._corpses[i]]) for i in ids])
            early = Rest(rest.kills - 1, rest.gradient_losses, rest.generation, decision)
            yield self._pack(ids, self._rest_id(early))
            return
        after = Rest(rest.kills - 1, rest.gradient_losses, rest.generation + 1)
        corpses = sorted(self._corpses[i] for i in ids)
        key = self._pack(corpses, self._rest_id(after))
        if key in self._killed:
            return
        self._killed.add(key)
        yield self._decided(corpses, after)
        if rest.gradient_losses:
            after = Rest(after.kills, rest.gradient_losses - 1, after.generation)
            for index, corpse in enumerate(corpses):
                lost = self._ranks[corpse]._replace(gradients=model.NOTHING, gradients_lost=True)
                yield self._decided(corpses[:index] + [self._id(lost)] + corpses[index + 1 :], after)

    def _decided(self, corpses: list[int], rest: Rest) -> int:
        """The fence is passed: one decision, by the function under exploration."""
        ranks = [self._ranks[i] for i in corpses]
        decision = self.rules.decide([model.view(rank) for rank in ranks])
        self.result.recoveries += 1
        self.result.modes.add(decision.mode)
        return self._recovery(corpses, decision, rest)

    def _recovery(self, corpses: list[int], decision: Decision, rest: Rest) -> int:
        ranks = [self._ranks[i] for i in corpses]
        if decision.mode is Mode.FALLBACK:
            model.check(self._fallback_is_needed(ranks), f"falls back for nothing: {decision.reason}")
            self.result.fallbacks += 1
        else:
            all_ready = min(-1 if rank.word is None else rank.word.step for rank in ranks)
            again = decision.mode is not Mode.FINISH and decision.step <= all_ready
            lost = any(rank.gradients_lost for rank in ranks)
            model.check(lost or not again, f"repeats step {decision.step}, of which every rank had its gradients")
        value = model.NOTHING
        if decision.values_from is not None:
            stored = ranks[decision.values_from].values[self.rules.slot(decision.step, self.scenario.slots)]
            model.check(stored[0] == decision.step, f"rank {decision.values_from} holds no values of {decision.step}")
            value = stored[1]
        decision = Decision(decision.mode, decision.step, "")  # one state, whatever the words of its reason
        lowering = [self._id(rank._replace(decision=decision, value=value)) for rank in ranks]
        return self._pack(lowering, self._rest_id(rest))

    def _compute_moves(self, rank: Rank) -> tuple[int, ...]:
        if rank.host is Host.DEAD and rank.decision is not None and rank.decision.mode is not Mode.FALLBACK:
            lowered = self.rules.lowered(rank.word, rank.decision)
            return (self._id(rank._replace(word=lowered, host=Host.LOWERED)),)
        threads = (moves.host_moves, moves.stream_moves)
        following = (moves_of(rank, self.scenario, self.rules) for moves_of in threads)
        return tuple(self._id(after) for after in following if after is not None)

    def _is_end(self, ranks: list[Rank]) -> bool:
        """Check a state in which no rank can move; say whether not even a kill can follow."""
        if ranks[0].decision is not None and ranks[0].decision.mode is Mode.FALLBACK:
            return True
        model.check(all(model.ended(rank, self.scenario) for rank in ranks), "deadlock: no rank can go on")
        wanted = self.scenario.applied(self.scenario.steps)
        for rank in ranks:
            model.check(set(rank.chunks) == {wanted}, f"final weights are wrong: {rank.chunks}, not {wanted}")
        self.result.ends += 1
        return False

    def _check_values(self, ranks: list[Rank]) -> None:
        for one, other in pairwise(sorted(rank.used for rank in ranks)):
            model.check(
                one[0] != other[0] or one == other, f"replicas drift: step {one[0]} used {one[1]} and {other[1]}"
            )

    def _fallback_is_needed(self, ranks: list[Rank]) -> bool:
        """Only gradients that somebody needs and nobody can make again justify a fallback."""
        step = min(-1 if rank.word is None else rank.word.step for rank in ranks)
        if step < 0:
            return False
        began = any(rank.word is not None and rank.word > Marker(step, Phase.SYNCED) for rank in ranks)
        done = Marker(step, Phase.DONE)
        return began and any(rank.gradients_lost and rank.word is not None and rank.word < done for rank in ranks)

    def _start_rest(self) -> int:
        return self._rest_id(Rest(self.scenario.kills, self.scenario.gradient_losses))

    def _rest_id(self, rest: Rest) -> int:
        if rest not in self._rest_ids:
            self._rest_ids[rest] = len(self._rests)
            self._rests.append(rest)
        return self._rest_ids[rest]

    def _id(self, rank: Rank) -> int:
        found = self._ids.get(rank)
        if found is not None:
            return found
        new = self._ids[rank] = len(self._ranks)
        self._ranks.append(rank)
        self._moves.append(None)
        self._arrived.append(model.arrived(rank))
        self._waits.append(model.waits_for_all(rank, self.scenario))
        self._corpses.append(new)
        self._corpses[new] = self._id(model.killed(rank))
        return new

    def _replaced(self, ids: list[int], index: int, rank_id: int, rest_id: int) -> int:
        after = ids.copy()
        after[index] = rank_id
        return self._pack(after, rest_id)

    def _pack(self, ids: list[int], rest_id: int) -> int:
        packed = rest_id
        for rank_id in sorted(ids):
            packed = packed << ID_BITS | rank_id
        return packed

    def _unpack(self, state: int) -> tuple[list[int], int]:
        ids = []
        for _ in range(self.scenario.ranks):
            ids.append(state & ID_MASK)
            state >>= ID_BITS
        ids.reverse()
        return ids, state
