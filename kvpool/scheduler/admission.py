"""Who gets blocks: from the tier first, then from the waiting queue, while slots, budget and blocks last."""

from __future__ import annotations

import numpy as np

from kvpool.errors import OutOfBlocks, OutOfSequences
from kvpool.scheduler.core import Core
from kvpool.scheduler.eviction import most_tokens, open_within
from kvpool.scheduler.sequence import DECODING, PREFILLING, Sequence


def known_tokens(sequence: Sequence) -> np.ndarray:
    """Return prompt and generated tokens of a sequence that does not run."""
    prompt = sequence.group.request.prompt
    return np.concatenate([prompt, sequence.tokens]) if len(sequence.tokens) else prompt


def blocks_kept(core: Core) -> int:
    """Blocks that an admission must leave: the watermark, and what the decodes of this very step may take."""
    rows = core.rows
    running = core.count[PREFILLING] + core.count[DECODING]
    if not running:
        return 0
    if core.growing < 0:
        decodes = core.batch().slots
        full = rows.kv_lens(decodes) % core.pool.block_size == 0
        core.growing = int(np.count_nonzero(full | rows.shared[decodes]))
    return core.growing + (running if core.watermark is None else core.watermark)


def fits(core: Core, tokens: np.ndarray, namespace: bytes, extra: int = 0) -> bool:
    """Whether `open(tokens)` and `extra` blocks more leave enough. Evicts nothing, but hits count as touched."""
    need = core.blocks(most_tokens(core, len(tokens))) + extra
    tokens = tokens[: core.findable + 1]
    keep = max(blocks_kept(core), core.pool.options.watermark)
    available = core.available()
    if available - need >= keep:
        return True
    if core.prefix is None or available <= keep:  # the last token always needs a block
        return False
    size = core.pool.block_size
    whole = tokens[: (len(tokens) - 1) // size * size]
    hits = core.prefix.match(tokens, namespace) // size
    if not hits or available - (need - hits) < keep:
        return False
    try:
        pinned = core.prefix.pin(whole, namespace)  # hits that are evictable are not available to the rest
    except OutOfSequences:
        return False
    try:
        return core.available() - (need - hits) >= keep
    finally:
        core.pool.close(pinned)


def admit(core: Core, sequence: Sequence) -> bool:
    """Give a waiting sequence (or the beam that it leads) a slot and blocks, if there are enough."""
    if sequence.group.beam is not None:
        return bool(sequence.group.beam.admit(core))
    if not core.rows.free:
        return False
    tokens = known_tokens(sequence)
    namespace = sequence.group.request.namespace
    if not fits(core, tokens, namespace):
        return False
    try:
        handle = open_within(core, tokens, namespace)
    except (OutOfBlocks, OutOfSequences):
        return False
    computed = core.pool.num_tokens(handle)
    core.queue.remove(sequence)
    count_admission(core, sequence, computed, len(tokens))
    core.start(sequence, core.rows.take(), handle, computed, core.admission_number())
    return True


def count_admission(core: Core, sequence: Sequence, computed: int, known: int) -> None:
    """Note an admission with so many known tokens, `computed` of them found in the cache."""
    group = sequence.group
    if group.admitted is None:
        group.admitted = core.clock()
        group.num_cached = min(computed, len(group.request.prompt))
    core.admissions += 1
    core.hit_tokens += computed
    core.chunks_allowed += -(-(known - computed) // core.chunk)


def restore(core: Core, sequence: Sequence) -> bool:
    """Bring a spilled sequence back from the tier, if there is room."""
    if not core.rows.free:
        return False
    prompt = sequence.group.request.prompt
    known = len(prompt) + len(sequence.tokens)
    if core.available() - core.blocks(most_tokens(core, known)) < max(blocks_kept(core), core.pool.options.watermark):
        return False
    try:
        handle = core.pool.open(most_tokens(core, known), sequence.group.request.namespace)
    except (OutOfBlocks, OutOfSequences):
        return False
    computed = sequence.computed
    try:
        core.set_length(handle, computed)
        core.tier.prefetch(sequence.kept, handle, core.pool.table(handle)[: core.blocks(computed)])
    except BaseException:
        core.pool.close(handle)
        raise
    del core.spilled[sequence]
    sequence.kept = None
    core.start(sequence, core.rows.take(), handle, computed, core.admission_number())
    core.rows.committed[sequence.slot] = 0
    return True


def admit_next(core: Core) -> Sequence | None:
    """Admit whoever is next. None: nobody waits, or there is no room for the first in line."""
    for sequence in core.spilled:
        return sequence if restore(core, sequence) else None
    head = core.queue.head()
    return head if head is not None and admit(core, head) else None
