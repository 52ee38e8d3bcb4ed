"""How refusals of the core read: C functions judge under the lock of a pool, and it is put in words after that."""

cdef tuple KINDS = ("full", "window", "chunk", "state")     # by LayerGroup.kind

cdef dict TEXTS = {             # what `refuse` raises: the values are named like the members of a Verdict
    NO_MEMORY: (MemoryError, "no memory for {value} entries"),
    OUT_OF_SEQUENCES: (OutOfSequences, "{value} sequences asked for, {other} are open, the limit is {high}"),
    NEGATIVE_HANDLE: (ValueError, "{handle} is negative ({value})"),
    FOREIGN_HANDLE: (ForeignHandle, "{handle} is not of this pool ({value})"),
    NO_SUCH_SEQUENCE: (StaleHandle, "{handle} names slot {other} ({value}), the pool has {high}"),
    STALE_HANDLE: (StaleHandle, "{handle} is stale ({value}: generation {generation}, current {other})"),
    DUPLICATE_HANDLE: (ValueError, "handles[{row}] is a duplicate ({value})"),
    NO_SUCH_BLOCK: (IndexError, "ids[{row}] is no block ({value}), ids are 0 .. {high}"),
    RESERVED_BLOCK: (ValueError, "ids[{row}] is a reserved block ({value}), reserved are 0 .. {high}"),
    DUPLICATE_BLOCK: (ValueError, "ids[{row}] is a duplicate ({value})"),
    UNREFERENCED: (DoubleFree, "block {value} has no reference"),
    REFERENCE_LIMIT: (OverflowError, "block {value} has {other} references, the limit is {limit}"),
    NO_RAW_REFERENCE: (DoubleFree, "block {value} has no raw reference to drop (refcount {other})"),
    STILL_SHARED: (ValueError, "block {value} has {other} references, only a block with one can be freed"),
    NOT_DRAINED: (ValueError, "the former content of block {value} was evicted, call drain_evicted first"),
    INDEXED: (ValueError, "the prefix cache looks after the content of blocks in this pool"),
    NOT_INDEXED: (ValueError, "the pool has no prefix cache (prefix_cache=False)"),
    BAD_SHAPE: (ValueError, "{value} {what} for {other} handles"),
    BAD_LENGTH: (ValueError, "lens[{row}] is {value}, it must be in {low} .. {high}"),
    PENDING_ROW: (PlanStateError, "{handle} is a row of a pending plan (step {value}); call done or rollback first"),
    LOADING_ROW: (PlanStateError, "{handle} is being loaded ({value}); call loaded first"),
    NOT_LOADING: (PlanStateError, "handle is not being loaded ({value})"),
    BAD_LOAD: (ValueError, "n is {value}, it must be 0 or {low} .. {high}"),
    CANNOT_LOAD: (ValueError, "load is True, but no prefix of this pool can be found: it needs prefix_cache=True, and "
                              "blocks for every state group"),
    UNEVEN_LOAD: (ValueError, "{value} tokens are to be loaded, a hit in this pool has a multiple of {high}"),
    NO_STATE_GROUP: (ValueError, "group {value} is not a state group of this pool"),
    NO_CHECKPOINTS: (OutOfSequences, "there is room for {high} checkpoints, and running sequences use them all"),
    NEGATIVE_NEW: (ValueError, "num_new[{row}] is negative ({value})"),
    SEQ_TOO_LONG: (CapacityExceeded, "row {row} would hold {value} tokens, the limit is {high}"),
    TABLE_TOO_WIDE: (CapacityExceeded, "row {row} needs {value} table entries, the plan holds {high}"),
    TOO_MANY_TOKENS: (CapacityExceeded, "{value} new tokens, the plan holds {high}"),
    PROMPT_TOO_LONG: (CapacityExceeded, "{value} tokens, a sequence has at most {high}"),
    PLAN_PENDING: (PlanStateError, "the plan is pending (step {value}); call done or rollback first"),
    PLAN_NOT_PENDING: (PlanStateError, "the plan is not pending{in_order}"),
    PLAN_NOT_NEWEST: (PlanStateError, "step {value} is not the newest, step {other} is pending"),
    PLAN_NOTED: (PlanStateError, "step {value} was declared done already"),
    PLAN_HAS_CHILDREN: (PlanStateError, "a sequence forked from a row of step {value} is open"),
    NEGATIVE_COUNT: (ValueError, "counts[{row}] is negative ({value})"),
    EVICTED_ROW: (ValueError, "tokens of row {row} were evicted, it commits no more ({value} tokens)"),
    NOT_DONE_YET: (ValueError, "{value} tokens from position {low} on for row {row}, which has {low} committed: only "
                               "{high} of its {other} tokens are done; commit takes those that follow"),
    OTHER_TOKENS: (ValueError, "block {value} of row {row} was committed with other tokens"),
    TOO_FEW_TOKENS: (ValueError, "counts ask for more than the {value} tokens"),
    TOO_MANY_LEFT: (ValueError, "counts use {other} of {value} tokens"),
    UNEVEN_TOKENS: (ValueError, "{value} tokens cannot be shared out evenly to {other} handles, counts are needed"),
    NOT_REWRITABLE: (ValueError, "block {value} of handles[{row}] {why}, it must not be rewritten; "
                                 "call unshare first"),
    BAD_INDEX: (ValueError, "indices[{row}] is {value}, the sequence has {high} full blocks"),
    INDEX_ORDER: (ValueError, "indices[{row}] is {value} after {other}, they must ascend"),
    NOT_KEPT: (ValueError, "block {value} is neither in use nor cached: its content is gone, take another "
                        "(touch with blank=True takes a free one)"),
    NAMED_TWICE: (DoubleFree, "block {value} stands twice, ids[{row}] is its second place"),
    HAS_CONTENT: (ValueError, "block {value} is cached already, uncache it first"),
    SEVERAL_GROUPS: (ValueError, "the pool has {value} layer groups, each with a table: name one"),
    NOT_ALLOCATED: (ValueError, "block {value} was not taken with alloc: in a pool with a prefix "
                                "cache incref takes no other block"),
    NO_SUCH_GROUP: (ValueError, "group is out of range ({value}), it must be in 0 .. {high}"),
    NOT_FULL: (ValueError, "group {value} is a {kind}, which lets go by itself: tokens are evicted from full groups "
                           "(group {other} is one)"),
    NO_FULL_GROUP: (ValueError, "group {value} is a {kind}, which lets go by itself: tokens are evicted from full "
                                "groups, and the pool has none"),
    WINDOW_IS_GONE: (ValueError, "lens[{row}] is {value}, but group {other} let go of what a query there reads; "
                                 "the least length that is left is {low}"),
    STATE_IS_GONE: (ValueError, "lens[{row}] is {value}, but the state of group {other} is that of {high} tokens"),
    TOO_FEW_BLOCKS: (ValueError, "arena {other} would have {value} blocks, the least is {low}: reserved ones, the "
                                 "watermark and a checkpoint have to fit"),
    TOO_MANY_SLOTS: (CapacityExceeded, "arena {other} would have {value} blocks of {low} tokens, a plan that has int32 "
                                       "slots can name {high}; make a pool of the largest size, and shrink it"),
    RAW_ABOVE: (ValueError, "block {value} has {other} references of callers, which nobody can tell where it goes; "
                            "release it first, or keep more than {value} blocks"),
    CLOCK_BACK: (ValueError, "now is {value}, the clock was at {low} already: it must not go back"),
    STEP_PENDING: (PlanStateError, "step {value} is pending, what is released waits for it; call done first"),
}


cdef str short_of_blocks(str call, const Verdict* v):
    """Text of a refusal for want of blocks; `open` judges a prompt (row -1, its tokens in `value`)."""
    if v.row >= 0:
        text = "{needed} blocks needed, {short_by} short; row {row} is the first that does not fit"
    elif v.value >= 0:
        text = ("{needed} blocks for {value} tokens of which {other} are cached, {short_by} short with a watermark of "
                "{low}")
    elif call == "resize":
        text = "{needed} blocks are in use, {short_by} more than would be there"
    else:
        text = "{needed} blocks asked for, {short_by} short"
    if v.arena:
        text += " in arena {arena}"
    return text + ": {blank} blank and {evictable} evictable, {limbo} in limbo"


@cython.callspec("KV_COLD")
cdef int refuse(str call, const Verdict* v) except -1:
    cdef dict told = v[0]
    if v.reason == OUT_OF_BLOCKS:
        text = short_of_blocks(call, v).format(**told)
        for name in ("reason", "value", "low", "high", "other"):
            del told[name]
        raise OutOfBlocks(f"[{call}] {text}", handle=v.high if v.row >= 0 else -1, **told)
    kind, text = TEXTS[v.reason]
    raise kind(f"[{call}] " + text.format(
        **told, limit=MAX_REFCOUNT,
        handle="handle" if v.row < 0 else f"handles[{v.row}]",
        generation=(v.value >> SLOT_BITS) & 0xFFFFFFFF,
        what="counts" if call == "commit" else "num_new" if call in ("can", "step", "reserve") else "lens",
        kind=KINDS[v.low] if v.reason in (NOT_FULL, NO_FULL_GROUP) else "",
        in_order=": in an in_order pool a step is done when it returns" if v.other else "",
        why=f"has {v.low} references" if v.low > 1 else "is committed" if v.high else "is read by a pending copy",
    ))
