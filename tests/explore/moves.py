"""What a rank does next: the stores of its host thread and of its stream, and its re-entry after a promotion."""

from explore.model import NOTHING, TORN, Host, Rank, Rules, Scenario, Stream, check, put
from leto_strategy.progress import Marker, Phase
from leto_strategy.recovery.decision import Mode


def passed(rank: Rank, scenario: Scenario, generation: int) -> Rank:
    """The synchronisation returned, with a value that differs between generations, as a sum in a new group may (C6)."""
    if scenario.values:
        return rank._replace(stream=Stream.VALUES_BEGIN, value=generation)
    return rank._replace(stream=Stream.SYNCED)


def host_moves(rank: Rank, scenario: Scenario, rules: Rules) -> Rank | None:
    """The next store of the host thread, None where it waits or has ended."""
    step = rank.host_step
    if rank.host is Host.ENTER:
        return reenter(rank, scenario, rules)
    if rank.host < Host.ENTER or step >= scenario.steps:
        return None
    index = rules.slot(step, scenario.slots)
    match rank.host:
        case Host.START_BEGIN:
            if not rules.may_record_start(step, rank.word, scenario.slots):
                return None
            return rank._replace(start_host=put(rank.start_host, index, NOTHING), host=Host.START_END)
        case Host.START_END:
            return rank._replace(start_host=put(rank.start_host, index, step), host=Host.MID_BEGIN)
        case Host.MID_BEGIN:
            return rank._replace(mid_host=put(rank.mid_host, index, NOTHING), host=Host.MID_END)
        case _:
            mid_host = put(rank.mid_host, index, step)
            return rank._replace(mid_host=mid_host, host_step=step + 1, host=Host.START_BEGIN)


def stream_moves(rank: Rank, scenario: Scenario, rules: Rules) -> Rank | None:
    """The next store of the stream, None where it waits for its host or for other ranks, or has ended."""
    step, operation = rank.step, rank.stream
    if rank.host <= Host.ENTER or step >= scenario.steps or operation is Stream.SYNC:
        return None
    issued = Host.MID_BEGIN if operation < Stream.MID_BEGIN else Host.MID_END + 1
    if (rank.host_step, rank.host) < (step, issued):
        return None
    index = rules.slot(step, scenario.slots)
    following = rank._replace(stream=Stream(min(operation + 1, Stream.RESTORE_END)))
    match operation:
        case Stream.START_BEGIN:
            return following._replace(start_stream=put(rank.start_stream, index, NOTHING))
        case Stream.START_END:
            return following._replace(start_stream=put(rank.start_stream, index, step))
        case Stream.ZERO:
            return following._replace(gradients=NOTHING, gradients_lost=False)
        case Stream.BACKWARD:
            check(step > rank.completed, f"step {step} is repeated, although this rank has completed it")
            right = all(chunk == scenario.applied(step) for chunk in rank.chunks)
            check(right, f"forward of step {step} reads parameters of another step or torn ones: {rank.chunks}")
            silent = step in scenario.skipped and not scenario.skipped_publish
            return begin(rank, step + 1) if silent else following._replace(gradients=step)
        case Stream.MID_BEGIN:
            return following._replace(mid_stream=put(rank.mid_stream, index, NOTHING))
        case Stream.MID_END:
            return following._replace(mid_stream=put(rank.mid_stream, index, step))
        case Stream.READY:
            check(rank.gradients == step, f"READY({step}) without final gradients")
            return mark(following, Marker(step, Phase.READY))
        case Stream.VALUES_BEGIN | Stream.VALUES_END:
            stored = (step, rank.value) if operation is Stream.VALUES_END else (NOTHING, NOTHING)
            return following._replace(values=(*rank.values[:index], stored, *rank.values[index + 1 :]))
        case Stream.SYNCED:
            after = Stream.DONE if step in scenario.skipped else Stream.UNDO_COPY
            return mark(rank._replace(stream=after, chunk=0), Marker(step, Phase.SYNCED))
        case Stream.DONE:
            return mark(begin(rank._replace(completed=step), step + 1), Marker(step, Phase.DONE))
        case _:
            return chunk_moves(rank, following, scenario)


def chunk_moves(rank: Rank, following: Rank, scenario: Scenario) -> Rank:
    """The transaction of one chunk (T2)."""
    step, chunk = rank.step, rank.chunk
    match rank.stream:
        case Stream.UNDO_COPY:
            return following._replace(undo=(chunk, rank.chunks[chunk])) if scenario.undo_first else following
        case Stream.UNDO_MARK:
            return mark(following, Marker(step, Phase.UNDO, chunk))
        case Stream.UPDATE_BEGIN:
            check(rank.gradients == step, f"the update of step {step} reads gradients that are not final")
            check(rank.chunks[chunk] == scenario.applied(step), f"update {step} of chunk {chunk} repeated or misplaced")
            return following._replace(chunks=put(rank.chunks, chunk, TORN), used=(step, rank.value))
        case Stream.UPDATE_END:
            return following._replace(chunks=put(rank.chunks, chunk, scenario.applied(step) + 1))
        case Stream.COMMIT:
            last = chunk + 1 == scenario.chunks
            after = (
                rank._replace(stream=Stream.DONE) if last else rank._replace(stream=Stream.UNDO_COPY, chunk=chunk + 1)
            )
            return mark(after, Marker(step, Phase.COMMIT, chunk))
        case Stream.RESTORE_BEGIN:
            right = rank.undo == (chunk, scenario.applied(step))
            check(right, f"the undo buffer holds {rank.undo}, not chunk {chunk} before update {step}")
            return following._replace(chunks=put(rank.chunks, chunk, TORN))
        case _:
            return rank._replace(chunks=put(rank.chunks, chunk, rank.undo[1]), stream=Stream.UPDATE_BEGIN)


def begin(rank: Rank, step: int) -> Rank:
    return rank._replace(step=step, stream=Stream.START_BEGIN, chunk=0, value=NOTHING)


def mark(rank: Rank, marker: Marker) -> Rank:
    check(rank.word is None or marker >= rank.word, f"{marker} takes back {rank.word}")
    return rank._replace(word=marker)


def reenter(rank: Rank, scenario: Scenario, rules: Rules) -> Rank:
    """A promoted trainer takes up the memory of its rank as the decision says. It only reads."""
    decision = rank.decision
    assert decision is not None
    step, word = decision.step, rank.word
    if decision.mode is Mode.FRESH:
        check(set(rank.chunks) == {0}, f"fresh start over parameters {rank.chunks}")
        return rank._replace(decision=None, host=Host.START_BEGIN)
    index = rules.slot(step, scenario.slots)
    check(rank.start_host[index] == rank.start_stream[index] == step, f"re-entry: START({step}) is not in its slot")
    starts, mids = forget(rank.start_host, step), forget(rank.mid_host, step)
    rank = rank._replace(decision=None, start_host=starts, start_stream=starts, mid_host=mids, mid_stream=mids)
    if decision.mode is Mode.REDO:
        return rank._replace(host_step=step, host=Host.MID_BEGIN, step=step, stream=Stream.ZERO)
    check(rank.mid_host[index] == rank.mid_stream[index] == step, f"re-entry: MID({step}) is not in its slot")
    check(word is not None and word >= Marker(step, Phase.READY), f"the update of step {step} is finished from {word}")
    assert word is not None
    rank = rank._replace(host_step=step + 1, host=Host.START_BEGIN)
    if word >= Marker(step, Phase.DONE):
        return begin(rank, step + 1)
    return resume(rank._replace(step=step), word, scenario, index)


def forget(slots: tuple[int, ...], step: int) -> tuple[int, ...]:
    return tuple(held if held >= step else NOTHING for held in slots)


def resume(rank: Rank, word: Marker, scenario: Scenario, index: int) -> Rank:
    """Where a rank that is not DONE goes on in its update."""
    match word.phase:
        case Phase.READY | Phase.SYNCED if scenario.values and rank.value == NOTHING:
            return rank._replace(stream=Stream.SYNC)  # no values anywhere: nobody began, and all synchronise again
        case Phase.READY:
            return rank._replace(stream=Stream.VALUES_BEGIN if scenario.values else Stream.SYNCED)
        case Phase.SYNCED:
            resumed = rank._replace(stream=Stream.DONE if rank.step in scenario.skipped else Stream.UNDO_COPY)
        case Phase.UNDO:
            resumed = rank._replace(stream=Stream.RESTORE_BEGIN, chunk=word.chunk)
        case _:
            last = word.chunk + 1 == scenario.chunks
            resumed = rank._replace(
                stream=Stream.DONE if last else Stream.UNDO_COPY, chunk=0 if last else word.chunk + 1
            )
    if scenario.values:
        check(rank.values[index][0] == rank.step, f"{word} without its values")
        resumed = resumed._replace(value=rank.values[index][1])
    return resumed
