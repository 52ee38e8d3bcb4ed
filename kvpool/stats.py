"""Named results of the core."""

from typing import Any, NamedTuple, Self

from kvpool.groups import Group


class PoolOptions(NamedTuple):
    """The arguments of a pool: ``Pool(**pool.options._asdict())`` is another pool like it."""

    num_blocks: int  #: blocks of the pool, reserved ones included
    block_size: int  #: tokens per block
    max_seqs: int  #: sequences that may be open at a time
    max_blocks_per_seq: int  #: blocks of tokens that one sequence may hold in a layer group
    reserved_blocks: int  #: blocks that are never handed out
    watermark: int  #: blocks that `open` leaves for growth
    in_order: bool  #: every step counts as done when it returns
    seed: int  #: of content hashes
    prefix_cache: bool  #: the pool has `Pool.prefix`
    events: int  #: events of the prefix cache that are kept
    lookahead: int = 0  #: tokens that `truncate` can always take back
    groups: tuple[Group, ...] = ()  #: layer groups, one at least


class PoolStats(NamedTuple):
    """Counters of a pool; those of blocks are of one arena. All are always up to date, so reading them is O(1).

    Blocks: ``num_blocks == reserved + blank + evictable + limbo + used``.
    """

    num_blocks: int  #: blocks of the pool
    reserved: int  #: blocks that are never allocated
    blank: int  #: blocks without a reference and without content
    evictable: int  #: committed blocks without a reference, out of limbo
    limbo: int  #: released blocks that a pending step may still use
    used: int  #: blocks with a reference, or held by a pending plan
    shared: int  #: blocks with two or more references
    sequences: int  #: open sequences
    pending: int  #: plans neither done nor rolled back
    cow_copies: int  #: copies of all steps so far
    cow_tokens: int  #: tokens of these copies
    allocs: int  #: blocks taken so far
    evictions: int  #: cached blocks evicted so far
    peak_used: int  #: most blocks in use at any time
    tokens: int  #: sum of the lengths of open sequences, evicted tokens included
    capacity: int  #: sum of their capacities, in positions
    fragmentation: float  #: 1 - tokens / capacity; 0.0 without capacity
    evicted_tokens: int  #: tokens that left open sequences by eviction so far

    @property
    def free(self) -> int:
        """Blocks that an allocation can get now: blank and evictable ones."""
        return self.blank + self.evictable


class PrefixStats(NamedTuple):
    """Counters of a prefix cache; reading them is O(1)."""

    queries: int  #: calls of `open` with tokens, without those with ``again=True``
    query_tokens: int  #: their tokens
    hit_tokens: int  #: of these, found cached
    hit_rate: float  #: hit_tokens / query_tokens; 0.0 when none
    nodes: int  #: nodes of the cache now, a base block of tokens each
    inserted: int  #: nodes ever
    duplicates: int  #: committed entries of full groups whose content was known
    evicted: int  #: entries of full groups that left to make room
    namespaces: int  #: namespaces known
    checkpoints: int = 0  #: that hits can use now; none are taken where all layer groups are full
    checkpoints_taken: int = 0  #: whose states a step saved
    checkpoints_published: int = 0  #: that a commit made known
    checkpoints_used: int = 0  #: by one hit or more
    checkpoints_skipped: int = 0  #: wanted, but blocks or a window were gone
    checkpoints_evicted: int = 0  #: that left to make room
    again_queries: int = 0  #: calls of `open` with tokens and ``again=True``: of requests that were admitted before
    again_query_tokens: int = 0  #: their tokens
    again_hit_tokens: int = 0  #: of these, found cached
    kept: int = 0  #: nodes that a directive keeps now


class PlanLimits(NamedTuple):
    """Sizes of the arrays of a plan, which no step on it may exceed."""

    max_rows: int  #: rows of a batch
    max_tokens: int  #: new tokens of a batch
    table_width: int  #: blocks of a row of `block_tables`


class PageBatchInfo(NamedTuple):
    """The fields of Levanter's wire format (JAX ragged paged attention), as arrays of a plan."""

    slot_ids: Any  #: int32 ``[S]``, the sequence's slot in the pool
    page_indices: Any  #: int32 ``[S, W]``, block tables, padded with -1
    seq_lens: Any  #: int32 ``[S]``, length after the step
    cu_q_lens: Any  #: int32 ``[S + 1]``, prefix sums of new tokens
    num_seqs: int  #: rows that are not padding
    new_token_dests: Any  #: int32 ``[T]``, slot of each new token, padded with -1
    page_size: int  #: tokens per page

    @classmethod
    def of(cls, plan: Any) -> Self:
        """The fields of a plan's last step; its format is ``page_batch_info``."""
        return cls(
            plan.slot_ids, plan.block_tables, plan.seq_lens, plan.cu_q_lens, len(plan.handles), plan.slot_mapping,
            plan.pool.block_size,
        )  # fmt: skip
