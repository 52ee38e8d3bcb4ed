"""Calls of the prefix cache: open with tokens, match, commit, pin, flush, statistics."""
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint32_t, uint64_t

from kvpool._args cimport Ints, ints_at, ints_free, ints_get, to_int
from kvpool._blocks cimport CACHED, Blocks, blocks_available, blocks_take_many, blocks_touch, whole_blocks
from kvpool._memory cimport xcalloc, xfree, xmalloc
from kvpool._prefix cimport (
    Index,
    Match,
    index_commit,
    index_drain,
    index_flush,
    index_free,
    index_init,
    index_match,
    index_nbytes,
    index_root_hash,
    index_same,
)
from kvpool._prefix_events cimport EventPool
from kvpool._record cimport (
    ALL, BATCH, COUNT, FLUSH, PIN,
    Record, put, put_bytes, put_ints, put_slots, put_wide, put_words, record_begin, record_end,
)
from kvpool._sequence cimport (
    OPEN,
    Seq,
    SeqPrefix,
    Seqs,
    seq_done,
    seq_find,
    seq_new,
    seq_next_handle,
    seq_refresh,
    seq_table,
    untagged,
)
from kvpool._types cimport NO_BLOCK, OK, OP_COMMIT, OP_OPEN, mix

import os
from collections import deque

from kvpool.errors import CapacityExceeded, OutOfBlocks, OutOfSequences
from kvpool.stats import PrefixStats

cdef uint32_t MOST_UIDS = 0xFFFFFFF0


cdef class PrefixPool(EventPool):
    """A prefix cache over committed blocks. See `kvpool.Pool` and docs/prefix.md."""

    def __cinit__(self, num_blocks, block_size, *, max_seqs=1024, max_blocks_per_seq=None, reserved_blocks=1,
                  watermark=0, in_order=False, seed=None, prefix_cache=False, events=0, record=0, _hash_bits=64):
        cdef Blocks* b = &self.blocks
        cdef Seqs* s = &self.seqs
        cdef int64_t bits = to_int(_hash_bits, "Pool", "_hash_bits", 0, 64)
        cdef int64_t room = to_int(events, "Pool", "events", 0, 1 << 30)
        cdef int32_t i
        self.seed = (int.from_bytes(os.urandom(8), "little") >> 1 if seed is None
                     else to_int(seed, "Pool", "seed", 0, INT64_MAX))
        if not isinstance(prefix_cache, bool):
            raise TypeError(f"[Pool] prefix_cache must be a bool, not {type(prefix_cache).__name__} ({prefix_cache!r})")
        if room and not prefix_cache:
            raise ValueError(f"[Pool] events ({room}) need prefix_cache=True")
        self.roots = {}
        self.sweep_at = 1024
        if not prefix_cache:
            return
        b.canonical = <int32_t*>xmalloc(b.num_blocks * sizeof(int32_t))
        s.prefix = <SeqPrefix*>xcalloc(s.max_seqs, sizeof(SeqPrefix))
        s.partial = <int32_t*>xcalloc(s.max_seqs, b.block_size * sizeof(int32_t))
        if (b.canonical == NULL or s.prefix == NULL or s.partial == NULL
                or index_init(&self.index, b, mix(0x5851F42D4C957F2DULL, <uint64_t>self.seed),
                              <uint64_t>-1 >> (64 - bits) if bits else 0) != OK):
            raise MemoryError(f"[Pool] no memory for an index of {b.num_blocks} blocks of {b.block_size} tokens")
        for i in range(b.num_blocks):
            b.canonical[i] = NO_BLOCK
        self.indexed = True
        if room:
            self.events = deque(maxlen=room)
            self.keys = {}
            self.names = {}
            self.index.journal_room = 64
            self.index.journal = <int32_t*>xmalloc(3 * 64 * sizeof(int32_t))
            if self.index.journal == NULL:
                raise MemoryError("[Pool] no memory for events")

    def __dealloc__(self):
        index_free(&self.index)

    cdef void release_memory(self):
        index_free(&self.index)
        self.indexed = False
        EventPool.release_memory(self)

    cdef int enter(self, str call) except -1:
        EventPool.enter(self, call)
        if self.indexed:
            try:
                self.catch_up()
            except BaseException:
                self.busy = False
                raise
        return 0

    cdef int catch_up(self) except -1:
        """What the calls before left to do."""
        if self.blocks.num_dropped:             # they took cached blocks
            index_drain(&self.index, &self.blocks)
        if self.index.journal_size or self.index.journal_lost:
            self.publish()
        if self.index.next_uid >= MOST_UIDS - 2 * <uint32_t>self.blocks.num_blocks:
            self.flush_root(0)      # node numbers are never reused while a node lives: they ran out, forget all
        return 0

    # -- arguments

    cdef int get_tokens(self, Tokens* tokens, object value, str call) except -1:
        """Read tokens as int32; int32 buffers are read in place. The caller must free ints and owned."""
        ints_get(&tokens.ints, value, call, "tokens", False, True)
        return self.check_tokens(tokens, call)

    cdef int check_tokens(self, Tokens* tokens, str call) except -1:
        cdef int64_t i, token
        cdef int32_t all_bits = 0
        tokens.size = tokens.ints.size
        if tokens.ints.width == 4:
            tokens.data = <const int32_t*>tokens.ints.data
            for i in range(tokens.size):
                all_bits |= tokens.data[i]
            if all_bits >= 0:
                return 0
        else:
            tokens.owned = <int32_t*>xmalloc(max(tokens.size, 1) * sizeof(int32_t))
            if tokens.owned == NULL:
                raise MemoryError(f"[{call}] no memory for {tokens.size} tokens")
            tokens.data = tokens.owned
        for i in range(tokens.size):
            token = ints_at(&tokens.ints, i)
            if token < 0 or token > 0x7FFFFFFF:
                raise ValueError(f"[{call}] tokens[{i}] is out of range ({token}), it must be in 0 .. {0x7FFFFFFF}")
            if tokens.owned != NULL:
                tokens.owned[i] = <int32_t>token
        return 0

    # -- namespaces

    cdef uint32_t find_root(self, bytes namespace, uint64_t* root_hash):
        """uid of a namespace's root, 0 if it is unknown."""
        root_hash[0] = index_root_hash(&self.index, namespace, len(namespace))
        return self.roots.get(namespace, 0)

    cdef uint32_t make_root(self, bytes namespace):
        cdef object uid
        if namespace not in self.roots:
            if len(self.roots) >= self.sweep_at:
                self.sweep_namespaces()
            uid = self.index.next_uid
            if self.events is not None:
                self.names[uid] = namespace
            self.roots[namespace] = uid         # last of what can fail
            self.index.next_uid += 1
        return self.roots[namespace]

    cdef void sweep_namespaces(self):
        """Forget namespaces without a node and without an open sequence, so that tenants do not pile up."""
        cdef int32_t i
        live = set()
        for i in range(self.blocks.num_blocks):
            if self.index.uid[i] and self.blocks.block[i].committed:
                live.add(self.index.root[i])
        for i in range(self.seqs.max_seqs):
            if self.seqs.life[i].life == OPEN:
                live.add(self.seqs.prefix[i].root)
        self.roots = {name: root for name, root in self.roots.items() if root in live}
        if self.names is not None:
            self.names = {root: name for name, root in self.roots.items()}
        self.sweep_at = max(1024, 2 * len(self.roots))

    # -- open, match, pin

    def open(self, tokens=0, namespace=b""):
        """A new sequence: with the cached prefix of a prompt, or empty with blocks for a number of tokens.

        Parameters
        ----------
        tokens : int or ints
            A count: blocks are taken for so many tokens, nothing is matched. Or the prompt, int32, int64 or a list,
            shape ``(n,)``, each 0 .. 2^31 - 1: its longest cached prefix is found, and blocks for the rest taken.
        namespace : bytes, default b""
            Prefixes are shared within a namespace only; see `kvpool.namespace`.

        Returns
        -------
        int
            The handle. Its `num_tokens` is the number of cached tokens: 0 for a count; for a prompt a multiple of
            block_size below n, so that at least the last token is computed.

        Raises
        ------
        OutOfBlocks
            The blocks would leave fewer than `watermark` free or evictable. State unchanged.
        CapacityExceeded
            More tokens than a sequence may have. State unchanged.
        OutOfSequences
            `max_seqs` sequences are open. State unchanged.

        Notes
        -----
        Match, references and blocks are one transaction: what was found cannot be evicted in between. O(n).
        """
        return self.with_tokens(tokens, namespace, "open", True)

    def pin(self, tokens, namespace=b""):
        """Hold the cached blocks of a prefix, from its root, against eviction; `unpin` lets go.

        Returns
        -------
        int
            The handle of a sequence over all full blocks that are cached; its `num_tokens` says how much that is.
        """
        return self.with_tokens(tokens, namespace, "pin", False)

    def unpin(self, handle):
        """Let go of a pinned prefix: `close`."""
        self.close(handle)

    cdef object with_tokens(self, object tokens, object namespace, str call, bint take):
        cdef Tokens prompt
        prompt.owned = NULL
        prompt.ints.held = False
        prompt.ints.owned = NULL
        self.enter(call)
        try:
            if type(namespace) is not bytes:
                raise TypeError(f"[{call}] namespace must be bytes, not {type(namespace).__name__}")
            if take and (not hasattr(tokens, "__len__") or getattr(tokens, "ndim", 1) == 0):
                prompt.size = to_int(tokens, call, "tokens", 0, INT64_MAX)
                prompt.data = NULL              # a count: there is nothing to match
            else:
                self.get_tokens(&prompt, tokens, call)
            return self.open_prompt(&prompt, namespace, call, take)
        finally:
            xfree(prompt.owned)
            ints_free(&prompt.ints)
            self.busy = False

    cdef object open_prompt(self, Tokens* tokens, bytes namespace, str call, bint take):
        """Match, judge, then commit. `take`: blocks for the rest of the prompt, and its last token is computed."""
        cdef Seqs* s = &self.seqs
        cdef Blocks* b = &self.blocks
        cdef Match found
        cdef uint64_t root_hash = 0
        cdef uint32_t root = 0
        cdef int64_t total, need, available
        cdef object handle
        cdef int32_t slot = s.free_slot[s.first_free] if s.num_free_slots else -1, k
        cdef int32_t* table = seq_table(s, slot) if slot >= 0 else NULL
        found.blocks = found.evictable = 0
        found.hash = 0
        if tokens.size > s.max_blocks * b.block_size:
            raise CapacityExceeded(f"[{call}] {tokens.size} tokens, a sequence has at most "
                                   f"{s.max_blocks * b.block_size}")
        total = whole_blocks(b, tokens.size + b.block_size - 1)
        if self.indexed:
            root = self.find_root(namespace, &root_hash)
            if root and tokens.data != NULL:
                found = index_match(&self.index, b, root, root_hash, tokens.data,
                                    <int32_t>whole_blocks(b, max(tokens.size - take, 0)), table)
        need = total - found.blocks if take else 0
        available = blocks_available(b) - found.evictable
        if need and need + s.watermark > available:
            raise OutOfBlocks(
                f"[{call}] {need} blocks for {tokens.size} tokens of which {found.blocks * b.block_size} are cached, "
                f"{b.num_blank} free and {b.lru.size} evictable ({found.evictable} of them part of the prefix), "
                f"watermark {s.watermark}", needed=need, short_by=need + s.watermark - available,
                free=b.num_blank, evictable=b.lru.size - found.evictable, limbo=b.limbo.size)
        if slot < 0:
            raise OutOfSequences(f"[{call}] {s.num_open} sequences are open, the limit is {s.max_seqs}")
        handle = seq_next_handle(s)             # made before anything moves
        if self.indexed:
            root = self.make_root(namespace)
        for k in range(found.blocks):
            if b.block[table[k]].place == CACHED:
                b.revivals += 1
                b.reuse_gap += b.allocs - b.fence[table[k]]
            blocks_touch(b, table[k])
        blocks_take_many(b, table + found.blocks, <int32_t>need)
        seq_new(s)
        s.seq[slot].num_blocks = found.blocks + <int32_t>need
        s.seq[slot].num_tokens = found.blocks * b.block_size
        s.sum_blocks += s.seq[slot].num_blocks
        s.sum_tokens += s.seq[slot].num_tokens
        seq_refresh(s, b, slot)
        if self.indexed:
            s.prefix[slot].committed = s.prefix[slot].done = s.prefix[slot].forked_at = s.seq[slot].num_tokens
            s.prefix[slot].root = root
            s.prefix[slot].root_hash = root_hash
            if take and tokens.data != NULL:
                self.index.queries += 1
                self.index.query_tokens += tokens.size
                self.index.hit_tokens += s.seq[slot].num_tokens
        b.digest = mix(mix(mix(b.digest, OP_OPEN), need), found.hash)
        b.digest = mix(mix(b.digest, found.blocks), untagged(s.seq[slot].handle))
        if self.record.data != NULL:
            self.record_open(tokens, namespace, slot, take)
        return handle

    cdef void record_open(self, const Tokens* tokens, bytes namespace, int32_t slot, bint take) noexcept:
        cdef bint counted = tokens.data == NULL
        cdef uint32_t* at = record_begin(
            &self.record, OP_OPEN | ((not take) * PIN + counted * COUNT) << 8,
            4 + BATCH + len(namespace) // 4 + (0 if counted else tokens.size))
        if at != NULL:
            at = put_bytes(put(at, slot), <char*>namespace, len(namespace))
            at = put_wide(at, tokens.size) if counted else put_words(at, tokens.data, tokens.size)
        record_end(&self.record, at, self.blocks.digest)

    def match(self, tokens, namespace=b""):
        """Tokens of a prompt that `open` would find cached. No side effect. O(n)."""
        cdef Tokens prompt
        cdef uint64_t root_hash
        cdef uint32_t root
        prompt.owned = NULL
        prompt.ints.held = False
        prompt.ints.owned = NULL
        self.enter("match")
        try:
            if type(namespace) is not bytes:
                raise TypeError(f"[match] namespace must be bytes, not {type(namespace).__name__}")
            self.get_tokens(&prompt, tokens, "match")
            if not self.indexed:
                return 0
            root = self.find_root(namespace, &root_hash)
            if root == 0:
                return 0
            return index_match(
                &self.index, &self.blocks, root, root_hash, prompt.data,
                <int32_t>min(whole_blocks(&self.blocks, max(prompt.size - 1, 0)), self.seqs.max_blocks), NULL,
            ).blocks * self.blocks.block_size
        finally:
            xfree(prompt.owned)
            ints_free(&prompt.ints)
            self.busy = False

    # -- commit

    cdef int judge_commit(self, int32_t slot, const int32_t* tokens, int64_t count, Py_ssize_t row) except -1:
        cdef Seq* q = &self.seqs.seq[slot]
        cdef int64_t at = self.seqs.prefix[slot].committed, limit = seq_done(&self.seqs, &self.blocks, slot)
        cdef int64_t bs = self.blocks.block_size, done
        cdef int32_t id
        if count < 0:
            raise ValueError(f"[commit] counts[{row}] is negative ({count})")
        if count and self.seqs.life[slot].evicted:
            raise ValueError(f"[commit] tokens of row {row} were evicted, it commits no more ({count} tokens)")
        if count > limit - at:
            raise ValueError(f"[commit] {count} tokens from position {at} on for row {row}, only {limit} of its "
                             f"{q.num_tokens} tokens are done")
        done = -(at % bs)                       # first block boundary, from the first token of this call
        while done + bs <= count:               # a block that somebody else committed must say the same
            id = seq_table(&self.seqs, slot)[(at + done) // bs]
            if self.blocks.block[id].committed and not (
                    index_same(&self.index, id, tokens + done) if done >= 0 else
                    self.same_tail(slot, id, tokens, done)):
                raise ValueError(f"[commit] block {id} of row {row} was committed with other tokens")
            done += bs
        return 0

    cdef bint same_tail(self, int32_t slot, int32_t id, const int32_t* tokens, int64_t start) noexcept:
        """index_same for a block whose first tokens were committed by earlier calls."""
        cdef int64_t k, bs = self.blocks.block_size
        cdef const int32_t* known = self.index.tokens + id * bs
        for k in range(bs):
            if known[k] != (tokens[start + k] if start + k >= 0 else self.seqs.partial[slot * bs + k]):
                return False
        return True

    cdef void commit_row(self, int32_t slot, const int32_t* tokens, int64_t count):
        cdef SeqPrefix* prefix = &self.seqs.prefix[slot]
        cdef int64_t bs = self.blocks.block_size, offset, n, k
        cdef int32_t* partial = self.seqs.partial + slot * bs
        while count:
            offset = prefix.committed % bs
            n = min(count, bs - offset)
            prefix.committed += n
            if n == bs:
                index_commit(&self.index, &self.blocks, seq_table(&self.seqs, slot),
                             <int32_t>(prefix.committed // bs) - 1, prefix.root, prefix.root_hash, tokens)
            else:
                for k in range(n):
                    partial[offset + k] = tokens[k]
                if offset + n == bs:
                    index_commit(&self.index, &self.blocks, seq_table(&self.seqs, slot),
                                 <int32_t>(prefix.committed // bs) - 1, prefix.root, prefix.root_hash, partial)
            tokens += n
            count -= n

    def commit(self, handles, tokens, counts=None):
        """Make tokens known: the blocks they fill become immutable, and hits for later prompts.

        Parameters
        ----------
        handles : int or ints
            Sequences, int64, shape ``(S,)``, no duplicates.
        tokens : ints
            Tokens of all rows, one after the other, int32 or int64, shape ``(sum of counts,)``: of each row the
            positions after those committed before.
        counts : int or ints, optional
            Tokens per row; default: equally many for each.

        Raises
        ------
        ValueError
            A position is not done yet (its step is pending), tokens contradict a shared block, shapes differ.
            State unchanged.
        StaleHandle, ForeignHandle
            A handle is not open in this pool. State unchanged.

        Notes
        -----
        O(tokens). A duplicate of a known block stays where it is: running tables never change.
        """
        cdef Ints rows, new
        cdef Tokens all_tokens
        self.enter("commit")
        rows.held = new.held = all_tokens.ints.held = False
        rows.owned = new.owned = all_tokens.ints.owned = NULL
        all_tokens.owned = NULL
        new.data = NULL
        new.size = -1
        try:
            self.refuse_unindexed()
            ints_get(&rows, handles, "commit", "handles", True, False)
            if counts is not None:
                ints_get(&new, counts, "commit", "counts", True, True)
            self.get_tokens(&all_tokens, tokens, "commit")     # last: what was judged here must not change again
            self.commit_all(&rows, &new, &all_tokens, counts is None)
        finally:
            xfree(all_tokens.owned)
            ints_free(&rows)
            ints_free(&new)
            ints_free(&all_tokens.ints)
            self.busy = False

    cdef int refuse_unindexed(self) except -1:
        if not self.indexed:
            raise ValueError("[commit] the pool has no prefix cache (prefix_cache=False)")
        return 0

    cdef int commit_all(self, Ints* rows, Ints* counts, const Tokens* tokens, bint even) except -1:
        """All rows or none; `even`: equally many tokens for each, whatever `counts` is."""
        cdef Py_ssize_t k
        cdef int64_t at = 0
        self.check_batch(rows, "commit")
        if even and tokens.size % max(rows.size, 1):
            raise ValueError(f"[commit] {tokens.size} tokens cannot be shared out evenly to {rows.size} "
                             f"handles, counts are needed")
        if even:
            counts.scalar = tokens.size // max(rows.size, 1)
        if counts.size >= 0 and counts.size != rows.size:
            raise ValueError(f"[commit] {counts.size} counts for {rows.size} handles")
        for k in range(rows.size):
            if ints_at(counts, k) > tokens.size - at:
                raise ValueError(f"[commit] counts ask for more than the {tokens.size} tokens")
            self.judge_commit(seq_find(&self.seqs, ints_at(rows, k)), tokens.data + at, ints_at(counts, k), k)
            at += ints_at(counts, k)
        if at != tokens.size:
            raise ValueError(f"[commit] counts use {at} of {tokens.size} tokens")
        at = 0
        for k in range(rows.size):
            self.commit_row(seq_find(&self.seqs, ints_at(rows, k)), tokens.data + at, ints_at(counts, k))
            at += ints_at(counts, k)
            self.blocks.digest = mix(mix(mix(self.blocks.digest, OP_COMMIT), untagged(ints_at(rows, k))),
                                     ints_at(counts, k))
        self.blocks.digest = mix(self.blocks.digest, self.index.next_uid)
        self.record_commit(rows, counts, tokens)
        return 0

    cdef void record_commit(self, const Ints* rows, const Ints* counts, const Tokens* tokens) noexcept:
        cdef Record* r = &self.record
        cdef uint32_t* at
        if r.data == NULL:
            return
        at = record_begin(r, OP_COMMIT, 3 * BATCH + rows.size + 2 * counts.size + tokens.size)
        if at != NULL:
            at = put_words(put_ints(put_slots(at, rows), counts), tokens.data, tokens.size)
        record_end(r, at, self.blocks.digest)

    cdef void note_done(self, const int64_t* handles, const int64_t* lengths, int32_t n):
        """The rows of a step that passed."""
        cdef int32_t i, slot
        if not self.indexed:
            return
        for i in range(n):
            slot = seq_find(&self.seqs, handles[i])
            if slot >= 0:
                self.seqs.prefix[slot].done = lengths[i]

    cdef void uncommit(self, int32_t slot, int64_t length):
        cdef SeqPrefix* prefix
        cdef int64_t bs = self.blocks.block_size, k
        cdef int32_t id
        if not self.indexed:
            return
        prefix = &self.seqs.prefix[slot]
        if length < prefix.committed:
            if length // bs < prefix.committed // bs and length % bs:       # a full block becomes the tail
                id = seq_table(&self.seqs, slot)[length // bs]
                for k in range(length % bs):
                    self.seqs.partial[slot * bs + k] = self.index.tokens[id * bs + k]
            prefix.committed = length
        prefix.done = min(prefix.done, length)
        prefix.forked_at = min(prefix.forked_at, length)

    # -- forgetting

    def flush(self, namespace=None):
        """Forget the cached blocks of a namespace, or of all.

        Evictable ones become blank; blocks in use stay with their sequences and become blank when released.

        Returns
        -------
        int
            Blocks that became blank. O(num_blocks + max_seqs).
        """
        cdef uint32_t root
        cdef int32_t blank
        cdef object uid
        cdef Py_ssize_t size
        cdef uint32_t* at
        self.enter("flush")
        try:
            if namespace is not None and type(namespace) is not bytes:
                raise TypeError(f"[flush] namespace must be bytes or None, not {type(namespace).__name__}")
            size = -1 if namespace is None else len(<bytes>namespace)
            if not self.indexed:
                return 0
            if namespace is None:
                blank = self.flush_root(0)
            else:
                event = ("cleared", namespace)
                uid = self.roots.pop(namespace, 0)
                root = uid
                blank = self.flush_root(root) if root else 0
                if self.events is not None:     # also for one that is not known any more: nobody shall see that
                    self.names.pop(uid, None)
                    self.add_event(event)
            self.blocks.digest = mix(mix(self.blocks.digest, OP_COMMIT), ~<uint64_t>blank)
            if self.record.data != NULL:
                at = record_begin(&self.record, FLUSH | (size < 0) * ALL << 8, 2 + size // 4)
                if at != NULL and namespace is not None:
                    at = put_bytes(at, <char*><bytes>namespace, size)
                record_end(&self.record, at, self.blocks.digest)
            return blank
        finally:
            self.busy = False

    cdef int32_t flush_root(self, uint32_t root) except -1:
        """Forget every node below a root, 0: all; sequences go on without the index. Returns blocks made blank."""
        cdef int32_t slot, blank = index_flush(&self.index, &self.blocks, root)
        for slot in range(self.seqs.max_seqs):
            if self.seqs.life[slot].life == OPEN and (root == 0 or self.seqs.prefix[slot].root == root):
                self.seqs.prefix[slot].root = 0
        if root == 0:
            self.roots.clear()
            self.index.next_uid = 1             # no node and no root is left that could be mistaken
        if self.events is not None:
            self.publish()
            if root == 0:
                self.names.clear()
                self.add_event(("cleared", None))
        return blank

    def _set_next_uid(self, uid):
        """For tests: the number of the next node."""
        self.index.next_uid = <uint32_t>to_int(uid, "_set_next_uid", "uid", self.index.next_uid, (<int64_t>1 << 32) - 1)

    # -- statistics and events

    @property
    def index_nbytes(self):
        """Bytes that the index has taken, once; 0 without a prefix cache."""
        return index_nbytes(&self.index, &self.blocks)

    def prefix_stats(self):
        """Counters of the prefix cache, O(1); see `kvpool.stats.PrefixStats`."""
        cdef Index* ix = &self.index
        self.enter("prefix_stats")
        try:
            return PrefixStats(
                ix.queries, ix.query_tokens, ix.hit_tokens, ix.hit_tokens / <double>ix.query_tokens if ix.query_tokens
                else 0.0, ix.num_nodes, ix.inserted, ix.duplicates, ix.evicted, len(self.roots),
                self.blocks.reuse_gap / <double>self.blocks.revivals if self.blocks.revivals else 0.0)
        finally:
            self.busy = False
