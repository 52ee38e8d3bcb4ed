"""`SchedulerStats`: named counters of a scheduler."""

from typing import NamedTuple


class SchedulerStats(NamedTuple):
    """Counters of a scheduler; every one is kept up to date, so reading them is O(1).

    The first four count sequences as they are now, the rest count since the beginning. A request is one sequence
    until its prompt is computed, then `n` or a beam's hypotheses.
    """

    waiting: int  #: sequences without blocks: not admitted yet, or preempted
    prefilling: int  #: running, known tokens left to compute
    decoding: int  #: running, one token a step
    spilled: int  #: with their KV in the tier
    finished: int  #: outputs that ended by themselves
    cancelled: int  #: outputs that were cancelled
    rejected: int  #: requests that could never run, or found the queue full
    admissions: int  #: sequences that got blocks, repeated ones included
    preemptions: int  #: sequences that lost their blocks
    spills: int  #: sequences that the tier took
    steps: int  #: updates
    decode_tokens: int  #: computed, one per decoding row and step
    prefill_tokens: int  #: computed in chunks
    recomputed_tokens: int  #: of these, computed before a preemption already
    hit_tokens: int  #: found in the prefix cache at admissions
    sampled_tokens: int  #: tokens that became known by `update`
    evicted_tokens: int  #: that left sequences for their budgets
