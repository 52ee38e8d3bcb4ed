"""Blocks of one arena. Nothing here knows what a sequence is.

A *reference* is an entry of a table that names the block, or a raw one of a caller. A *hold* is a
pending step that took the block out of a table and has still to copy from it; the *floor* is how
many leading tokens such copies read. A block without references and holds is in *limbo* while a
step is pending, then *blank* (nothing in it), or *evictable* (committed: its content is known).

    num_blocks - reserved == num_blank + num_evictable + limbo.size + num_used
    used  <=>  refcount + hold > 0
    free to be taken == num_blank + num_evictable

Why it is so:

- Limbo. Steps are planned before the device runs them, so a block that is released now may still be
  read. It waits for the newest pending step, its *fence*. Which steps read it need not be known,
  and as each release waits for a step at least as new as those before it, fences never decrease
  along the list: who lets blocks out looks at its head only.
- A hold is no reference. The row that gave the block up does not read it any more, so the last of
  its other owners is its only one and may write, which a reference would forbid.
- The floor. That owner may write behind what the pending copies read, since these bytes and those
  are different ones. So of n forks that share a tail, n - 1 take a block and one writes in place.
- The fence of a block in use is the step that fills it by a copy. Until that is done the block has
  no content, and nobody may publish it. It is 0 once the copy will never be made.
- A prefix cache orders what may leave itself, in units. It takes evictable blocks off the LRU list
  when it first sees them, so a hit or an eviction changes one list and not two.
- The blank ones are a stack, so what is taken is what was used last, and equal calls take equal
  ids.
"""

cdef enum:
    SETTLED = -1                # fence of an evictable block that the prefix cache has taken off the LRU list

cdef enum:
    BLANK = 0                   # on the blank stack
    EVICTABLE = 1               # on the LRU list, or SETTLED
    LIMBO = 2                   # on the limbo list
    USED = 3                    # referenced or held
    RESERVED = 4

cdef struct Block:              # all that a hit or a release touches, 32 bytes: two to a cache line
    int32_t refcount            # table entries of sequences + raw
    int32_t raw                 # references of block-level calls, counted in refcount too
    int32_t hold                # pending plans that replaced this block in a table
    uint8_t place
    uint8_t committed           # immutable, and cached when released
    uint8_t noted               # its id is in the dropped list
    int32_t next                # links of the list it is on
    int32_t prev
    int64_t fence               # step that must pass: in limbo, and for the dst of its copy to have content, else a
                                # number no pending step has; evictable: SETTLED, or 0


cdef struct Chain:              # doubly linked list through Block.next and Block.prev
    int32_t head                # oldest
    int32_t tail                # newest
    int32_t size


# Invariants beside those above, recomputed by blocks_check:
#   on the LRU list  <=>  place == EVICTABLE and fence != SETTLED
#   refcount == entries in tables of open sequences + raw   (checked where the tables are)
#   floor == 0 unless hold > 0
#   USED and fence >= oldest_pending > 0  =>  dst of a copy of the pending plan with that id  (checked with the plans)
#   num_shared == number of blocks with refcount > 1
#   limbo fences never decrease from head to tail, and are >= oldest_pending; limbo is empty when newest_pending == 0
cdef struct Blocks:
    Block* block                # [num_blocks]
    int32_t* floor              # [num_blocks] most tokens any pending copy reads from the block
    int32_t* blank              # [num_blocks] stack of blank ids, top at num_blank - 1
    int32_t* dropped            # [num_blocks] committed ids that were taken since the last drain
    uint32_t* mark              # [num_blocks] == stamp: seen in the running call
    uint32_t stamp
    int32_t num_blocks
    int32_t reserved
    int32_t num_blank
    int32_t num_evictable
    int32_t num_used
    int32_t num_shared
    int32_t num_dropped
    int32_t peak_used
    int64_t block_size          # tokens
    int64_t turns               # grows when a block in use may have ceased to be its row's own, or a tail moved
    Chain lru
    Chain limbo
    int64_t newest_pending      # id of the newest pending step, 0: none
    int64_t oldest_pending      # id of the oldest pending step, 0: none
    int64_t allocs              # blocks taken, ever
    int64_t evictions           # of these, cached ones; and those that `evict` or `uncache` cleared
    int64_t cow_copies
    int64_t cow_tokens
    uint64_t digest
