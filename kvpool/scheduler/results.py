"""Results of a step: checks and appends tokens, ends sequences, forks samples. Also cancels requests."""

from __future__ import annotations

from heapq import heappop
from typing import Any, NamedTuple

import numpy as np
from numpy import float32, int32, int64
from numpy.typing import NDArray

from kvpool.errors import OutOfSequences
from kvpool.scheduler.policy import publish
from kvpool.scheduler.request import (
    DECODING,
    END_TOKENS,
    FINISHED,
    MOST,
    PREFILLING,
    WAITING,
    Output,
    RequestGroup,
    Sequence,
)
from kvpool.scheduler.state import Core, DecodeBatch, LaneRows, Step


class Given(NamedTuple):
    """Checked arguments of `update`."""

    tokens: NDArray[int32]
    logprobs: NDArray[float32] | None
    beams: tuple[NDArray[int32], NDArray[float32]] | None = None


def read(step: Step, tokens: Any, logprobs: Any, beams: Any) -> Given:
    """Check the arguments of `update`. Changes nothing."""
    tokens = _tokens("tokens", tokens, step.sample_at.shape)
    if logprobs is not None:
        logprobs = _numbers("logprobs", logprobs, step.sample_at.shape)
    rows = len(step.beam_width.nonzero()[0])
    if beams is None:
        if rows:
            raise ValueError(f"[update] {rows} rows of the step are of beams, beams is missing")
        return Given(tokens, logprobs)
    try:
        beam_tokens, beam_logprobs = beams
    except (TypeError, ValueError):
        raise TypeError(f"[update] beams must be (tokens, logprobs), not {type(beams).__name__}") from None
    shape = np.shape(beam_tokens)
    least = 2 * int(step.beam_width.max(initial=0))
    if len(shape) != 2 or shape[0] != rows or shape[1] < least:
        raise ValueError(f"[update] the tokens of beams have shape {shape}, they must have ({rows}, {least} or more)")
    beam_tokens = _tokens("the tokens of beams", beam_tokens, shape)
    beam_logprobs = _numbers("the logprobs of beams", beam_logprobs, shape)
    if np.isnan(beam_logprobs).any() or (beam_logprobs == np.inf).any():
        raise ValueError("[update] the logprobs of beams must be finite or -inf, one is NaN or +inf")
    return Given(tokens, logprobs, (beam_tokens, beam_logprobs))


def _tokens(name: str, array: Any, shape: tuple[int, ...]) -> NDArray[int32]:
    array = _numbers(name, array, shape, "integers", "iu")
    if array.size and (array.min() < 0 or (array.dtype != np.int32 and array.max() > MOST)):
        raise ValueError(f"[update] {name} must be 0 .. {MOST} ({array.min() if array.min() < 0 else array.max()})")
    return array.astype(np.int32, copy=False)


def _numbers(name: str, array: Any, shape: tuple[int, ...], what: str = "float32", kinds: str = "f") -> np.ndarray:
    """Return `array`, which must be one of `shape` whose dtype is of these kinds. Floats become float32."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"[update] {name} must be an ndarray of {what}, not {type(array).__name__}")
    if array.dtype.kind not in kinds:
        raise TypeError(f"[update] {name} must be {what} ({array.dtype})")
    if array.shape != shape:
        raise ValueError(f"[update] {name} must have shape {shape} ({array.shape})")
    return array.astype(np.float32, copy=False) if kinds == "f" else array


def fan_out(
    core: Core, at: NDArray[int32], lane: NDArray[int32], index: NDArray[int32]
) -> tuple[NDArray[int32], NDArray[int32], NDArray[int32]]:
    """Repeat the rows of requests whose samples are not forked yet, once per sample."""
    groups = [core.rows.sequence(s).group for s in lane.tolist()]
    times = np.array([1 if group.forked else group.request.n for group in groups], np.intp)
    if not (times > 1).any():
        return at, lane, index
    begin = np.cumsum(times) - times
    which = np.arange(times.sum()) - np.repeat(begin, times)
    return np.repeat(at, times), np.repeat(lane, times), (np.repeat(index, times) + which).astype(np.int32)


def alive(core: Core, step: Step) -> NDArray[np.bool_]:
    """Return which rows of a step still run: they have not ended, and nobody has cancelled them."""
    still: NDArray[np.bool_] = core.rows.handle.take(step.lanes) == step.handles
    return still


def take(core: Core, step: Step, given: Given, now: float) -> list[Output]:
    """Advance the sequences of an executed step. Rows that ended or were cancelled meanwhile get nothing."""
    core.steps += 1
    if core.eviction is not None:
        core.eviction.settle()
    still = core.rows.handle.take(step.lanes) == step.handles  # `alive`
    is_whole = still.all()
    if not is_whole:
        step.taken = np.isin(step.sample_lane, step.lanes[still])
    if step.batch is None or not is_whole:
        return take_rows(core, step, given, still, 0, now)
    outputs = take_decodes(core, step.batch, step.sample_position, given, now)
    if len(step.lanes) > step.num_decodes:
        outputs += take_rows(core, step, given, still, step.num_decodes, now)
    return outputs


def take_rows(core: Core, step: Step, given: Given, still: NDArray[np.bool_], begin: int, now: float) -> list[Output]:
    """Advance the rows from `begin` on that `still` run. Earlier samples belong to earlier rows."""
    rows, still = core.rows, still[begin:]
    lanes, samples, position = step.lanes[begin:], step.sample_lane[begin:], step.sample_position[begin:]
    core.idle_steps += not still.all()
    advance(core, lanes[still], step.num_new[begin:][still], int(still[: step.num_decodes - begin].sum()))
    live = np.isin(samples, lanes[still])
    plain = live & (step.beam_width[begin:] == 0)
    core.sampled_tokens += int(plain.sum())
    fans = take_fans(core, samples, plain) if core.unforked else {}
    ended = append(core, samples, given, plain, begin)
    end_prompts(core, samples[live & (position == 0)], now)
    for lane in step.lanes[step.num_decodes :][still[step.num_decodes - begin :]].tolist():
        if core.has_checkpoints:
            core.commit(lane)  # before the next step lets go of what the checkpoint needs
        core.set_phase(lane)
    outputs = [core.finish(rows.sequence(lane), reason, now) for lane, reason in ended]
    for lane, ats in fans.items():
        outputs += fork_samples(core, lane, [begin + at for at in ats], given, now)
    if given.beams is not None:
        outputs += move_beams(core, step, begin, live, given.beams, now)
    return outputs


def take_decodes(core: Core, batch: DecodeBatch, at: NDArray[int32], given: Given, now: float) -> list[Output]:
    """Advance the decodes, which are the first rows of a step. Makes no Python object per row unless one ends.

    `at` begins with the number of tokens that each row has generated before.
    """
    rows, lanes, n = core.rows, batch.lanes, len(batch.lanes)
    at, tokens = at[:n], given.tokens[:n]
    core.decode_tokens += len(lanes)
    core.sampled_tokens += len(lanes)
    rows.computed.put(lanes, rows.computed.take(lanes) + 1)
    for tenant, count in batch.tenants:
        tenant.served += count
    if batch.shared:
        rows.shared[lanes] = batch.shared = False
    generated = store(rows, lanes, at, tokens, None if given.logprobs is None else given.logprobs[:n])
    if not at.min():  # prompts of which one token was left to compute
        end_prompts(core, lanes[at == 0], now)
    watched = batch.watch == tokens[:, None]
    full = generated >= batch.limit
    if not (watched.any() or full.any()):
        return []
    ended = why(rows, lanes, generated, watched.any(axis=1) | full)
    return [core.finish(rows.sequence(lane), reason, now) for lane, reason in ended]


def end_prompts(core: Core, lanes: np.ndarray, now: float) -> None:
    """Record that the prompts of these sequences are computed: their first tokens are known."""
    for lane in lanes.tolist():
        group = core.rows.sequence(lane).group
        group.first_token = now if group.first_token is None else group.first_token
        if core.rows.committed[lane] < core.rows.found[lane]:  # it came from a tier
            publish(core, lane)
        else:
            core.commit(lane)


def take_fans(core: Core, samples: NDArray[int32], plain: np.ndarray) -> dict[int, list[int]]:
    """Remove samples that must be forked first from `plain`. Return their positions by lane."""
    fans: dict[int, list[int]] = {}
    for at in np.flatnonzero(plain).tolist():
        lane = int(samples[at])
        if not core.rows.sequence(lane).group.forked:
            fans.setdefault(lane, []).append(at)
            plain[at] = False
    return fans


def move_beams(
    core: Core, step: Step, first: int, live: np.ndarray, found: tuple[np.ndarray, np.ndarray], now: float
) -> list[Output]:
    """Advance every beam of a step. The rows of a beam are adjacent, all from sample `first` on."""
    outputs: list[Output] = []
    samples, begin = np.flatnonzero(step.beam_width), 0
    while begin < len(samples):
        end = begin + 1
        if live[samples[begin] - first]:
            beam = core.rows.sequence(step.sample_lane[samples[begin]]).group.beam
            end = begin + len(beam.live)
            outputs += beam.move_on(core, *(array[begin:end] for array in found), now)
        begin = end
    return outputs


def advance(core: Core, lanes: NDArray[int32], new: NDArray[int64], decodes: int) -> None:
    """Count the inputs of these rows as computed. The first rows are decodes."""
    rows = core.rows
    core.decode_tokens += decodes
    for lane in lanes[:decodes].tolist():
        rows.sequence(lane).group.tenant.served += 1
    if len(lanes) > decodes:
        chunk, count = lanes[decodes:], new[decodes:]
        core.prefill_tokens += int(count.sum())
        again = np.minimum(rows.high[chunk] - rows.computed[chunk], count)
        core.recomputed_tokens += int(again[again > 0].sum())
    rows.computed[lanes] += new.astype(np.int32)
    rows.shared[lanes] = False


def append(core: Core, samples: NDArray[int32], given: Given, chosen: np.ndarray, begin: int) -> list[tuple[int, str]]:
    """Append one token each. Return the lanes that ended, and why, in order of rows."""
    lanes = samples[chosen]
    if not len(lanes):
        return []
    rows, tokens = core.rows, given.tokens[begin:][chosen]
    logprobs = None if given.logprobs is None else given.logprobs[begin:][chosen]
    generated = store(rows, lanes, rows.generated[lanes], tokens, logprobs)
    watched = (rows.watch[lanes] == tokens[:, None]).any(axis=1)
    return why(rows, lanes, generated, watched | (generated >= rows.limit[lanes]))


def store(
    rows: LaneRows, lanes: np.ndarray, at: NDArray[int32], tokens: NDArray[int32], logprobs: NDArray[float32] | None
) -> NDArray[int32]:
    """Append one token each to lanes that have generated `at` tokens. Return the new counts."""
    place = lanes.astype(np.intp) * rows.tokens.shape[1] + at
    rows.tokens.put(place, tokens)
    if logprobs is not None or rows.logprobs is not None:
        kept = rows.need_logprobs() if rows.logprobs is None else rows.logprobs
        kept.put(place, np.nan if logprobs is None else logprobs)
    rows.last.put(lanes, tokens)
    generated = at + np.int32(1)
    rows.generated.put(lanes, generated)
    longest = int(generated.max())
    if longest >= rows.tokens.shape[1]:
        rows.make_room(longest + 1)
    return generated


def why(rows: LaneRows, lanes: np.ndarray, generated: NDArray[int32], maybe: np.ndarray) -> list[tuple[int, str]]:
    """Return the lanes that ended, and why. Only lanes in `maybe` can have ended."""
    ended = []
    for row in maybe.nonzero()[0].tolist():
        lane = int(lanes[row])
        reason = why_ended(rows.sequence(lane).group, rows.tokens[lane, : generated[row]])
        if reason is not None:
            ended.append((lane, reason))
    return ended


def why_ended(group: RequestGroup, tokens: NDArray[int32]) -> str | None:
    """Return why a sequence with these generated tokens ends. None: it goes on."""
    request = group.request
    if int(tokens[-1]) in request.eos:
        return "eos"
    end = tuple(tokens[-END_TOKENS:].tolist()) if request.stop else ()
    if any(end[-len(stop) :] == stop for stop in request.stop):
        return "stop"
    return "length" if len(tokens) >= request.max_tokens else None


def fork_samples(core: Core, lane: int, ats: list[int], given: Given, now: float) -> list[Output]:
    """Make n sequences of one whose prompt is computed, each with its first token.

    The first one that goes on keeps lane and blocks. The others become forks while there is room. The rest wait in the
    line of their tenant.
    """
    rows, first = core.rows, core.rows.sequence(lane)
    group = first.group
    group.forked = True
    core.unforked -= 1
    group.sequences += [Sequence(group, index) for index in range(1, len(ats))]
    group.unfinished += len(ats) - 1
    core.count[WAITING] += len(ats) - 1
    outputs, live = [], []
    for sequence, at in zip(group.sequences, ats, strict=True):
        sequence.tokens = given.tokens[at : at + 1].copy()
        sequence.logprobs = None if given.logprobs is None else given.logprobs[at : at + 1].copy()
        reason = why_ended(group, sequence.tokens)
        if reason is None:
            live.append(sequence)
        else:
            outputs.append((sequence, reason))
    handle, computed = int(rows.handle[lane]), int(rows.computed[lane])
    committed, admitted, gone = int(rows.committed[lane]), int(rows.admitted[lane]), int(rows.gone[lane])
    seen = None if core.eviction is None else core.eviction.memory.saved(lane)
    rows.leave(lane)
    core.move(first, WAITING)
    if not live:
        core.pool.close(handle)
    for number, sequence in enumerate(live):
        own = handle if number == 0 else fork(core, handle)
        if own is None:
            core.queue.push(sequence)
            continue
        sequence.high = sequence.paid = computed
        core.start(sequence, core.rows.take(), own, computed, core.admission_number() if number else admitted)
        rows.committed[sequence.lane], rows.gone[sequence.lane] = committed, gone
        if core.eviction is not None and seen is not None:
            core.eviction.memory.put(sequence.lane, seen)
        rows.shared[sequence.lane] = core.needs.shares(computed - gone)
    return [core.finish(sequence, reason, now) for sequence, reason in outputs]


def fork(core: Core, handle: int) -> int | None:
    """Fork a handle if a lane is free and its first own token would find its blocks. Otherwise return None."""
    need = core.needs.fork(core.count[DECODING] + core.count[PREFILLING])
    if not core.rows.free or core.needs.short(need, core.available()) >= 0:
        return None
    try:
        return int(core.pool.fork(handle)[0])
    except OutOfSequences:
        return None


def expire(core: Core, now: float) -> list[Output]:
    """End the requests whose deadline has passed."""
    outputs = []
    while core.deadlines and core.deadlines[0][0] <= now:
        group = core.group_of(heappop(core.deadlines))
        if group is not None:
            outputs += cancel(core, group, now, "deadline")
    core.cancelled -= len(outputs)
    core.expired += len(outputs)
    return outputs


def cancel(core: Core, group: RequestGroup, now: float, reason: str = "cancelled") -> list[Output]:
    """End a request in any state."""
    if group.beam is not None:
        return group.beam.cancel(core, now, reason)
    live = [sequence for sequence in group.sequences if sequence.state != FINISHED]
    for sequence in live:
        if sequence.lane >= 0 and core.pool.is_open(int(core.rows.handle[sequence.lane])):
            core.commit(sequence.lane)
        core.release(sequence)
    if not group.forked:  # samples that were still to come
        live += [Sequence(group, index) for index in range(1, group.request.n)]
        core.cancelled += group.request.n - 1
        core.unforked -= 1
    core.close_group(group, group.unfinished)
    return [core.output(sequence, reason, now) for sequence in live]


def give_up(core: Core, steps: list[Step]) -> None:
    """Preempt the sequences of failed steps that cannot be rolled back: what they wrote is unknown."""
    rows = core.rows
    lanes = np.unique(np.concatenate([step.lanes[alive(core, step)] for step in steps]))
    for lane in lanes[rows.admitted[lanes].argsort()[::-1]].tolist():
        sequence = rows.sequences[lane]
        # Else it was preempted with its beam, or somebody has reset the pool: then it is for `cancel`.
        if sequence is not None and core.pool.is_open(int(rows.handle[lane])):
            core.preempt(sequence)
