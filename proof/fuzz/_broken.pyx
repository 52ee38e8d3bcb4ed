"""Pools with one planted bug each, which the fuzzer must find: `FAULTS` names them, `broken(name)` makes one.

Each bug is put in around a call of a sound `kvpool.Pool`, by changing its memory before or after the call. The pool
itself has none of them. They are bugs of other allocators. A bug is here if one of the fuzzer's judges can find it:
content, references, lists, refusals, arrays.
"""
from libc.stdint cimport int32_t, int64_t

from kvpool._core cimport (
    BLANK, LIMBO, NO_BLOCK, REMOVED, SLOT_MAPPING, USED, BlockAPI, Blocks, Name, Names, Note, Plan, Pool,
    PrefixCache, Ring, Seq, SeqPrefix, Seqs,
    LOADING, OPEN, blocks_drain_limbo, blocks_unref, name_leave, names_by_uid, names_find, names_hash, seq_find,
    seq_refresh, seq_table, slot_of,
)

from functools import wraps

from kvpool import errors


cdef class _Opened:
    """A pool whose memory can be reached."""
    cdef Pool pool
    cdef Blocks* b
    cdef Seqs* s

    def __cinit__(self, Pool pool):
        self.pool = pool
        self.b = &pool.state.blocks
        self.s = &pool.state.seqs

    cdef int32_t find(self, object handle):
        """Slot of an open sequence, -1 for whatever else a call was given."""
        return seq_find(self.s, handle) if type(handle) is int and 0 <= handle < 1 << 63 else -1


def _copy_missing(pool, kept, plan, *_):
    if (<Plan>plan).copies_made:
        (<Plan>plan).copies_made -= 1
        (<Plan>plan).step.num_copies -= 1


def _copy_short(pool, kept, plan, *_):
    cdef Plan p = plan
    if p.copies_made and p.step.copies[2] > 1:
        p.step.copies[2] -= 1


def _slot_wrong(pool, kept, plan, *_):
    cdef Plan p = plan
    if p.tokens and p.wire.field[SLOT_MAPPING].width == 4:
        (<int32_t*>p.wire.field[SLOT_MAPPING].data)[p.tokens - 1] ^= 1


def _dirty_missed(pool, kept, plan, *_):
    (<Plan>plan).wire.num_dirty = 0


def _served_wrong(pool, kept, plan, *_):
    (<Plan>plan).wire.served[0] ^= 1


def _fork_uncounted(pool, kept, handle, *_):
    cdef _Opened o = _Opened(pool)
    cdef int32_t slot = o.find(handle), i
    if slot >= 0 and o.s.seq[slot].num_blocks:
        i = seq_table(o.s, slot)[0]
        if o.b.block[i].refcount > 1:
            o.b.block[i].refcount -= 1
            o.b.num_shared -= o.b.block[i].refcount == 1


def _positions_anew(pool, kept, handle, *_):
    cdef _Opened o = _Opened(pool)
    cdef int32_t slot = o.find(handle)
    if slot >= 0:
        o.s.life[slot].evicted = o.s.life[slot].point = 0


def _released_twice(pool, kept, *_):
    cdef _Opened o = _Opened(pool)
    if 0 < o.b.num_blank < o.b.num_blocks:
        o.b.blank[o.b.num_blank] = o.b.blank[o.b.num_blank - 1]
        o.b.num_blank += 1


def _unfenced(pool, kept, *_):
    cdef _Opened o = _Opened(pool)
    cdef int64_t newest = o.b.newest_pending
    o.b.newest_pending = 0
    blocks_drain_limbo(o.b)
    o.b.newest_pending = newest


def _take_floors(pool, *_):
    cdef _Opened o = _Opened(pool)
    kept = {}
    for i in range(o.b.num_blocks):
        if o.b.floor[i]:
            kept[i] = o.b.floor[i]
            o.b.floor[i] = 0
    return kept


def _put_floors(pool, kept, *_):
    cdef _Opened o = _Opened(pool)
    for i, floor in kept.items():
        o.b.floor[i] = max(o.b.floor[i], <int32_t>floor)


def _take_shares(pool, *_):
    cdef _Opened o = _Opened(pool)
    kept = {}
    for i in range(o.b.num_blocks):
        if o.b.block[i].refcount > 1:
            kept[i] = o.b.block[i].refcount - 1
            o.b.block[i].refcount = 1
    return kept


def _put_shares(pool, kept, *_):
    cdef _Opened o = _Opened(pool)
    for i, count in kept.items():
        o.b.block[i].refcount += <int32_t>count


def _take_commits(pool, *_):
    cdef _Opened o = _Opened(pool)
    kept = {}
    for i in range(o.b.num_blocks):
        if o.b.block[i].place == USED and o.b.block[i].committed:
            kept[i] = o.b.block[i].committed
            o.b.block[i].committed = 0
    return kept


def _put_commits(pool, kept, *_):
    cdef _Opened o = _Opened(pool)
    for i, committed in kept.items():
        o.b.block[i].committed = committed


def _block_lost(pool, kept, *_):
    cdef _Opened o = _Opened(pool)
    if o.b.num_blank:
        o.b.num_blank -= 1


def _length_kept(pool, kept, plan, *_):
    cdef _Opened o = _Opened(pool)
    cdef Plan p = plan
    cdef int32_t slot
    if p.step.num_rows:
        slot = slot_of(p.step.handle[0])
        if o.s.seq[slot].handle == p.step.handle[0] and (
                o.s.seq[slot].kv_len < o.s.seq[slot].num_blocks * o.b.block_size):
            o.s.seq[slot].kv_len += 1
            o.s.sum_tokens += 1
            seq_refresh(o.s, o.b, slot)


def _rotate_table(pool, handle, length):
    """So that a truncation drops the oldest blocks."""
    cdef _Opened o = _Opened(pool)
    cdef int32_t slot = o.find(handle), n, keep
    cdef int32_t* table
    if slot >= 0 and type(length) is int and 0 <= length <= o.s.seq[slot].kv_len:
        n = o.s.seq[slot].num_blocks
        keep = <int32_t>((length + o.b.block_size - 1) // o.b.block_size)
        table = seq_table(o.s, slot)
        ids = [table[i] for i in range(n)]
        for i in range(n):
            table[i] = ids[(i + n - keep) % n]
        return ids
    return None


def _rotate_back(pool, kept, handle, *_):
    cdef _Opened o = _Opened(pool)
    if kept is not None:
        for i, block in enumerate(kept):
            seq_table(o.s, slot_of(handle))[i] = block


def _reservation_lost(pool, kept, plan, *_):
    cdef _Opened o = _Opened(pool)
    cdef Plan p = plan
    cdef Seq* q
    if p.step.num_rows:
        q = &o.s.seq[slot_of(p.step.handle[0])]
        if q.num_blocks * o.b.block_size - q.kv_len >= o.b.block_size:
            q.num_blocks -= 1
            o.s.sum_blocks -= 1
            blocks_unref(o.b, seq_table(o.s, slot_of(p.step.handle[0]))[q.num_blocks])
            seq_refresh(o.s, o.b, slot_of(p.step.handle[0]))


def _take_watermark(pool, *_):
    cdef _Opened o = _Opened(pool)
    kept = o.s.watermark
    o.s.watermark = 0
    return kept


def _put_watermark(pool, kept, *_):
    (<Pool>pool).state.seqs.watermark = kept


def _used_evicted(pool, kept, *_):
    cdef _Opened o = _Opened(pool)
    cdef int32_t i
    for i in range(o.b.reserved, o.b.num_blocks):
        if o.b.block[i].place == USED and o.b.block[i].committed:
            o.b.block[i].place = BLANK
            o.b.blank[o.b.num_blank] = i
            o.b.num_blank += 1
            return


def _generation_kept(pool, kept, handles):
    cdef _Opened o = _Opened(pool)
    for handle in (handles if hasattr(handles, "__len__") else [handles]):
        o.s.life[slot_of(handle)].generation -= 1


def _nodes_stay(pool, kept, *_):
    cdef _Opened o = _Opened(pool)
    cdef int32_t k
    if o.pool.state.indexed and 2 * <int64_t>o.pool.state.index.num_nodes < o.pool.state.index.mask:  # a search ends
        for k in range(o.b.num_dropped):
            o.b.block[o.b.dropped[k]].noted = 0
        o.b.num_dropped = 0


def _fake_tokens(pool, tokens=0, namespace=b""):
    """A root node takes on the prompt's tokens: found, not proved."""
    cdef Pool p = pool
    cdef int64_t k, bs = p.state.blocks.block_size
    cdef int32_t id
    cdef Name* name
    cdef Names* names
    if not p.state.indexed or not hasattr(tokens, "__len__") or len(tokens) <= bs:
        return None
    names = &p.state.index.names
    name = names_find(names, names_hash(names, <const char*><bytes>namespace, len(namespace)),
                      <const char*><bytes>namespace, len(namespace))
    if name == NULL:
        return None
    for at in range(<int64_t>p.state.index.mask + 1):
        id = p.state.index.bucket[at].id
        if id != NO_BLOCK and p.state.index.bucket[at].parent == name.uid and p.state.blocks.block[id].place != LIMBO:
            kept = [p.state.index.tokens[id * bs + k] for k in range(bs)]
            for k in range(bs):
                p.state.index.tokens[id * bs + k] = tokens[k]
            return id, kept
    return None


def _true_tokens(pool, kept, *_):
    cdef Pool p = pool
    if kept is not None:
        for k in range(p.state.blocks.block_size):
            p.state.index.tokens[<int64_t>kept[0] * p.state.blocks.block_size + k] = kept[1][k]


def _raw_eaten(pool, kept, *_):
    cdef _Opened o = _Opened(pool)
    cdef int32_t i
    for i in range(o.b.reserved, o.b.num_blocks):
        if o.b.block[i].raw and o.b.block[i].refcount > 1:
            o.b.block[i].refcount -= 1
            o.b.num_shared -= o.b.block[i].refcount == 1
            return


def _lru_swapped(pool, kept, *_):
    cdef _Opened o = _Opened(pool)
    cdef int32_t a, c
    if o.b.lru.size == 2:
        a, c = o.b.lru.head, o.b.lru.tail
        o.b.lru.head, o.b.lru.tail = c, a
        o.b.block[c].next, o.b.block[a].prev = a, c
        o.b.block[c].prev = o.b.block[a].next = NO_BLOCK


def _hold_forgotten(pool, plan):
    if (<Plan>plan).step.log.size:
        (<Plan>plan).step.log.size -= 1


def _pending_hidden(pool, *_):
    cdef _Opened o = _Opened(pool)
    kept = o.b.oldest_pending
    o.b.oldest_pending = 0
    return kept


def _pending_shown(pool, kept, *_):
    (<Pool>pool).state.blocks.oldest_pending = kept


def _spaces_kept(pool, *_):
    """Nobody will forget the namespaces that there are."""
    cdef Pool p = pool
    cdef int64_t at
    for at in range(p.state.index.names.mask + <int64_t>1 if p.state.indexed else 0):
        if p.state.index.names.by_bytes[at] != NULL:
            p.state.index.names.by_bytes[at].users += 1


def _take_roots(pool, *_):
    cdef Pool p = pool
    cdef int32_t slot
    if not p.state.indexed or p.state.index.ring.limit:
        return {}
    found = {slot: p.state.seqs.prefix[slot].root for slot in range(p.state.seqs.max_seqs)
             if p.state.seqs.seq[slot].handle >= 0 and p.state.seqs.seq[slot].kv_len == 0
             and p.state.seqs.prefix[slot].root}
    for root in found.values():
        names_by_uid(&p.state.index.names, root).users += 1
    return found


def _put_roots(pool, kept, *_):
    cdef Pool p = pool
    cdef SeqPrefix* prefix
    for slot, root in kept.items():
        prefix = &p.state.seqs.prefix[<int32_t>slot]
        if prefix.root:                     # another namespace was flushed
            name_leave(&p.state.index.names, prefix.name)
        else:
            prefix.name = names_by_uid(&p.state.index.names, root)
            prefix.root = root


def _deferred_reversed(pool, kept, *_):
    cdef Pool p = pool
    cdef int64_t newest, k
    if p.state.num_deferred:
        newest = p.state.deferred[p.state.num_deferred - 1]
        for k in range(p.state.num_deferred - 1, 0, -1):
            p.state.deferred[k] = p.state.deferred[k - 1]
        p.state.deferred[0] = newest


def _take_partials(pool, handle, n=1):
    """What stands where the children's last partial tokens are going to be."""
    cdef _Opened o = _Opened(pool)
    cdef int32_t parent = o.find(handle), slot, k
    cdef int64_t at
    if parent < 0 or not o.pool.state.indexed or n > o.s.num_free_slots:
        return {}
    at = o.s.prefix[parent].committed % o.b.block_size - 1
    slots = [o.s.free_slot[(o.s.first_free + k) % o.s.max_seqs] for k in range(n)]
    return {slot * o.b.block_size + at: o.s.partial[slot * o.b.block_size + at] for slot in slots if at >= 0}


def _put_partials(pool, kept, *_):
    for at, token in kept.items():
        (<Pool>pool).state.seqs.partial[<int64_t>at] = token


def _take_fences(pool, *_):
    """Every copy counts as made."""
    cdef _Opened o = _Opened(pool)
    cdef int32_t i
    kept = {}
    for i in range(o.b.num_blocks):
        if o.b.canonical != NULL and o.b.block[i].place == USED and 0 < o.b.oldest_pending <= o.b.block[i].fence:
            kept[i] = o.b.block[i].fence
            o.b.block[i].fence = 0
    return kept


def _put_fences(pool, kept, *_):
    cdef _Opened o = _Opened(pool)
    for i, fence in kept.items():
        if o.b.block[<int32_t>i].place == USED:
            o.b.block[<int32_t>i].fence = fence


def _hide_held(pool, *_):
    kept = (<Pool>pool).state.blocks.num_waiting
    (<Pool>pool).state.blocks.num_waiting = 0
    return kept


def _show_held(pool, kept, *_):
    (<Pool>pool).state.blocks.num_waiting += <int32_t>kept


def _first_row_committed(pool, kept, handles, tokens, counts=None):
    """Two rows of one call contradict each other: the first is believed."""
    if counts is None or len(counts) < 2:
        return False
    try:
        PrefixCache(pool).commit(handles[:1], tokens[:counts[0]], counts[:1])
    except ValueError:
        return False
    try:
        PrefixCache(pool).commit(handles[1:], tokens[counts[0]:], counts[1:])
    except ValueError as error:
        return "other tokens" in str(error)
    return False


def _removal_untold(pool, kept, *_):
    """The newest event is lost, if it is that a node went."""
    cdef Ring* ring = &(<Pool>pool).state.index.ring
    cdef Note* note
    if ring.size:
        note = <Note*>(ring.data + (ring.first + ring.size - 1) % ring.room * ring.stride)
        ring.size -= note.kind == REMOVED


def _take_digest(pool, *_):
    return (<Pool>pool).state.blocks.digest


def _put_digest(pool, kept, *_):
    """That something was committed or forgotten changes the digest, what it was does not."""
    (<Pool>pool).state.blocks.digest = (kept * 3 + 1) & 0xFFFFFFFFFFFFFFFF


def _trace_left(pool, kept, *_):
    cdef _Opened o = _Opened(pool)
    cdef int32_t n = o.b.num_blank
    if n > 1:
        o.b.blank[n - 1], o.b.blank[n - 2] = o.b.blank[n - 2], o.b.blank[n - 1]


def _unload(pool, handle, *_):
    """The slot of a sequence that is loaded, which looks like any other for now; -1: it is none."""
    cdef _Opened o = _Opened(pool)
    cdef int32_t slot
    if type(handle) is int and 0 <= handle < 1 << 63:
        slot = slot_of(handle)
        if slot < o.s.max_seqs and o.s.life[slot].life == LOADING and o.s.seq[slot].handle == ~<int64_t>handle:
            o.s.life[slot].life, o.s.seq[slot].handle = OPEN, handle
            return slot
    return -1


def _load_on(pool, kept, *_):
    cdef _Opened o = _Opened(pool)
    if kept >= 0:
        o.s.life[<int32_t>kept].life = LOADING
        o.s.seq[<int32_t>kept].handle = ~o.s.seq[<int32_t>kept].handle


def _whole_load(pool, kept, handle, n):
    cdef _Opened o = _Opened(pool)
    cdef int32_t slot = o.find(handle)
    if slot >= 0 and n == 0:
        o.s.sum_tokens += o.s.seq[slot].num_blocks * o.b.block_size - o.s.seq[slot].kv_len
        o.s.seq[slot].kv_len = o.s.seq[slot].num_blocks * o.b.block_size
        seq_refresh(o.s, o.b, slot)


def _loads(pool, *_):
    cdef _Opened o = _Opened(pool)
    cdef int32_t slot
    return {slot for slot in range(o.s.max_seqs) if o.s.life[slot].life == LOADING}


def _published_early(pool, kept, tokens=0, *_):
    """The blocks of a load are hits before anybody has filled them."""
    cdef _Opened o = _Opened(pool)
    cdef int64_t length, whole, handle
    for slot in (_loads(pool) - kept if o.pool.state.indexed and hasattr(tokens, "__len__") else ()):
        length, whole = o.s.seq[<int32_t>slot].kv_len, len(tokens) // o.b.block_size * o.b.block_size
        handle = ~o.s.seq[<int32_t>slot].handle
        _unload(pool, handle)
        o.s.seq[<int32_t>slot].kv_len = o.s.prefix[<int32_t>slot].done = whole
        PrefixCache(pool).commit(handle, tokens[length:whole])
        o.s.seq[<int32_t>slot].kv_len = o.s.prefix[<int32_t>slot].done = length
        o.s.prefix[<int32_t>slot].committed = o.s.prefix[<int32_t>slot].published = length
        o.s.prefix[<int32_t>slot].published //= o.b.block_size
        _load_on(pool, slot)


#: name -> (methods, before the call, after it, where the call was refused: true if nobody shall know)
FAULTS = {
    "copy missing from the plan": (("step",), None, _copy_missing, None),
    "copy of too few tokens": (("step",), None, _copy_short, None),
    "slot_mapping off by one": (("step",), None, _slot_wrong, None),
    "changed row not dirty": (("step",), None, _dirty_missed, None),
    "served flag inverted": (("step",), None, _served_wrong, None),
    "fork without a reference": (("fork",), None, _fork_uncounted, None),
    "block released twice": (("close",), None, _released_twice, None),
    "fence removed": (("close", "truncate"), None, _unfenced, None),
    "floor of a pending copy ignored": (("step",), _take_floors, _put_floors, _put_floors),
    "write into a shared block": (("step",), _take_shares, _put_shares, _put_shares),
    "write into a committed block": (("step",), _take_commits, _put_commits, _put_commits),
    "rollback loses a block": (("rollback",), None, _block_lost, None),
    "rollback keeps a token": (("rollback",), None, _length_kept, None),
    "truncate frees the oldest": (("truncate",), _rotate_table, None, _rotate_back),
    "reservation lost": (("reserve",), None, _reservation_lost, None),
    "watermark ignored": (("open",), _take_watermark, _put_watermark, _put_watermark),
    "block in use evicted": (("evict",), None, _used_evicted, None),
    "generation not counted": (("close",), None, _generation_kept, None),
    "evicted node stays in the index": (("step", "open", "alloc"), None, _nodes_stay, None),
    "prefix hit without proof": (("open",), _fake_tokens, _true_tokens, _true_tokens),
    "close eats a raw reference": (("close",), None, _raw_eaten, None),
    "eviction order inverted": (("close",), None, _lru_swapped, None),
    "hold never released": (("done",), _hold_forgotten, None, None),
    "pending tokens committed": (("commit",), _pending_hidden, _pending_shown, _pending_shown),
    "shared block compacted": (("compact",), _take_shares, _put_shares, _put_shares),
    "committed block compacted": (("compact",), _take_commits, _put_commits, _put_commits),
    "copy missing from an unshare": (("unshare",), None, _copy_missing, None),
    "positions begin again after eviction": (("compact", "evict_blocks"), None, _positions_anew, None),
    "refused step leaves a trace": (("step",), None, None, _trace_left),
    "namespace never forgotten": (("open",), None, _spaces_kept, None),
    "empty sequence keeps its root over a flush": (("flush",), _take_roots, _put_roots, None),
    "deferred closes in reverse order": (("defer_close",), None, _deferred_reversed, None),
    "fork copies one partial token too few": (("fork",), _take_partials, _put_partials, None),
    "unwritten copy published": (("commit",), _take_fences, _put_fences, _put_fences),
    "held block never published": (("done",), _hide_held, _show_held, None),
    "contradiction inside one commit": (("commit",), None, None, _first_row_committed),
    "removal of a node untold": (("step", "open", "alloc", "commit"), None, _removal_untold, None),
    "digest blind to tokens": (("commit",), _take_digest, _put_digest, None),
    "digest blind to the flushed namespace": (("flush",), _take_digest, _put_digest, None),
    "close frees blocks that are loaded": (("close",), _unload, None, None),
    "row that is loaded forked": (("fork",), _unload, _load_on, _load_on),
    "row that is loaded shortened": (("truncate", "compact", "evict_blocks"), _unload, _load_on, _load_on),
    "load that failed counts": (("loaded",), None, _whole_load, None),
    "load published before it has come": (("open",), _loads, _published_early, None),
}


def around(original, before, after, refused):
    @wraps(original)
    def call(self, *args, **options):
        pool = self if isinstance(self, Pool) else self.pool
        kept = before(pool, *args) if before else None
        try:
            result = original(self, *args, **options)
        except (errors.KVPoolError, ValueError):
            if refused and refused(pool, kept, *args):
                return None
            raise
        if after:
            after(pool, kept, *args)
        return result

    return call


def broken(fault):
    """A class of pools with one planted bug, by its name in `FAULTS`."""
    methods, before, after, refused = FAULTS[fault]

    def wrong(kind, parts):
        calls = {name: around(getattr(kind, name), before, after, refused) for name in methods if hasattr(kind, name)}
        return type(f"Broken{kind.__name__}", (kind,), calls | parts)

    prefix, blocks = wrong(PrefixCache, {}), wrong(BlockAPI, {})
    return wrong(Pool, {
        "prefix": property(lambda pool: prefix(pool) if pool.options.prefix_cache else None),
        "blocks": property(lambda pool: blocks(pool)),
    })
