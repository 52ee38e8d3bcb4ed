"""The fuzzer's driver: the prefix cache, and what is told of it."""
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from kvpool._core cimport array_data
from proof.fuzz._books cimport (
    E_CLEARED,
    E_REMOVED,
    NOBODY,
    V_OK,
    V_VALUE,
    Line,
    Pending,
    Told,
    books_find,
    done_length,
    line_table,
)
from proof.fuzz._books_prefix cimport books_begin_batch, books_commit, books_flush, books_hits, books_judge_commit
from proof.fuzz._fuzz_base cimport S_CONTRADICTED, S_HELD_BACK, Word
from proof.fuzz._storage cimport line_token

import hashlib
from collections import deque

import numpy as np

from kvpool import errors
from proof.fuzz.ranks import ranks_agree
from proof.fuzz.shape import space_name

REFUSALS = (errors.KVPoolError, ValueError)


cdef class Prefixes(Evictions):
    """Commits, hits and events; see `proof.fuzz._fuzz.Driver`."""

    def __cinit__(self, shape, make_pool=None, trace=None):
        self.said = np.zeros(self.b.capacity + 1, np.int32)
        self.lie = <int32_t*>array_data(self.said)
        self.events = deque(maxlen=shape.pool.get("events", 0))

    cdef int32_t choose_commit(self, const Word* w) noexcept:
        """Rows and counts; often one that a pending plan names, or one and its neighbour. Returns how many."""
        cdef int32_t n = 1, i, first = self.pick(w.b), slot
        cdef int64_t most
        cdef const Pending* p
        if self.full and w.c & 0x30 == 0 and self.b.num_live > 1 and self.b.max_rows > 1:
            n = 2
        for i in range(n):
            self.rows[i] = self.b.live[(first + i) % self.b.num_live]
        if self.b.num_queue and w.c & 1 == 0:
            p = &self.b.plan[self.b.queue[self.b.num_queue - 1]]
            if p.num_entries:                       # it copies: the row of such a block
                slot = books_find(&self.b, p.handle[p.entry[w.b % <uint32_t>p.num_entries].row])
                if slot != NOBODY and (n == 1 or slot != self.rows[1]):
                    self.rows[0] = slot
        for i in range(n):
            most = done_length(&self.b, &self.b.line[self.rows[i]]) - self.b.line[self.rows[i]].committed
            self.count[i] = most if w.a >> 29 or not self.full else (w.a >> (8 * i)) % <uint64_t>(most + 2)
            self.handle[i] = self.b.line[self.rows[i]].handle + self.tag
        return n

    cdef int judge_commit(self, int32_t n, bint lying) noexcept:
        """What the chosen rows will meet; `lying`: the last row says what stands in `lie`."""
        cdef int32_t i
        cdef int verdict
        books_begin_batch(&self.b)
        for i in range(n):
            verdict = books_judge_commit(&self.b, self.rows[i], self.lie if lying and i == n - 1 else
                                         line_token(&self.s, &self.b, self.rows[i]), self.count[i])
            if verdict:
                return verdict
        return V_OK

    cdef int op_commit(self, const Word* w) except -1:
        """Make tokens known that are done; now and then one that is not, or others than somebody else said."""
        if not self.indexed or self.b.num_live == 0:
            return self.nothing()
        return self.commit(w, self.choose_commit(w))

    cdef int commit(self, const Word* w, int32_t n) except -1:
        """The chosen rows."""
        cdef Line* line
        cdef int64_t at, count
        cdef int32_t i
        cdef bint lying = False
        cdef int verdict = self.judge_commit(n, False)
        line = &self.b.line[self.rows[n - 1]]
        count = self.count[n - 1]
        if self.full and verdict == V_OK and count and w.c >> 30 == 0:
            memcpy(self.lie, line_token(&self.s, &self.b, self.rows[n - 1]), line.length * sizeof(int32_t))
            self.lie[line.committed + w.b % <uint64_t>count] ^= 1
            lying = self.judge_commit(n, True) != V_OK
            verdict = V_VALUE if lying else V_OK
            self.states[S_CONTRADICTED] += lying
        self.expect(verdict)
        if self.due is not None and not self.full:
            return self.nothing()
        tokens = []
        for i in range(n if self.full else 0):
            line = &self.b.line[self.rows[i]]
            for at in range(line.committed, line.committed + self.count[i]):
                tokens.append(self.lie[at] if lying and i == n - 1 else
                              line_token(&self.s, &self.b, self.rows[i])[at] if at < line.length else 0)
        counts = self.counts[:n].tolist()
        if self.trace is not None:
            names = self.names_of(n)
            self.say(f"pool.prefix.commit({names}, {tokens}, {counts})")
        try:
            if not self.full:
                self.direct_commit(self.handle[0], line_token(&self.s, &self.b, self.rows[0])
                                   + self.b.line[self.rows[0]].committed, self.count[0])
            elif n == 1:
                self.do_commit(self.handle[0], np.array(tokens, np.int32))
            else:
                self.do_commit(self.handles[:n], tokens, counts)
        except REFUSALS as error:
            return self.refused(error)
        self.accepted("commit")
        for i in range(n):
            books_commit(&self.b, self.rows[i], line_token(&self.s, &self.b, self.rows[i]), self.count[i])
            self.states[S_HELD_BACK] += self.b.line[self.rows[i]].waits
        return 0

    cdef bint choose_untold(self, int32_t at) noexcept:
        """The next sequence with a full block that others share and nobody committed: who commits now?"""
        cdef const Line* line
        cdef int32_t k, i, slot
        for k in range(self.b.num_live):
            slot = self.b.live[(at + k) % self.b.num_live]
            line = &self.b.line[slot]
            if (line.committed // self.b.block_size + 1) * self.b.block_size > done_length(&self.b, line):
                continue
            i = line_table(&self.b, slot)[line.committed // self.b.block_size]
            if self.b.page[i].refs > 1 and not self.b.page[i].final:
                self.rows[0] = slot
                self.handle[0] = line.handle + self.tag
                self.lens[0] = line.length - 1
                return True
        return False

    cdef int op_unshare_untold(self, const Word* w) except -1:
        """Copies of what is written and not committed yet; now and then that is committed before they are made."""
        cdef int32_t k = self.free_plan(w)
        if not self.indexed or not self.full or k < 0 or self.b.num_live == 0 or w.c >> 31 or (
                not self.choose_untold(self.pick(w.b))):
            return self.op_unshare(w)
        self.first = 0
        self.unshare(k, 1)
        if self.due is None and w.c >> 30:
            self.count[0] = done_length(&self.b, &self.b.line[self.rows[0]]) - self.b.line[self.rows[0]].committed
            self.commit(w, 1)
        return 0

    cdef int op_match(self, const Word* w) except -1:
        cdef int32_t n, hits, evictable, space = self.space_of(w)
        if not self.indexed:
            return self.nothing()
        n = self.make_prompt(w)
        hits = books_hits(&self.b, space, self.text, (n - 1) // self.b.block_size, self.id, &evictable)
        if self.trace is not None:
            self.trace.append(f"assert pool.prefix.match({self.prompt[:n].tolist()}, {space_name(space)!r}) == "
                              f"{hits * self.b.block_size}")
        found = self.pool.prefix.match(self.prompt[:n], space_name(space))
        if found != hits * self.b.block_size:
            self.fail(f"match found {found} tokens, {hits} blocks are cached")
        return 0

    cdef int op_flush(self, const Word* w) except -1:
        cdef int32_t space = NOBODY if w.a % 4 == 3 else <int32_t>(w.a % 4)
        cdef int64_t due
        if not self.indexed:
            return self.nothing()
        due = books_flush(&self.b, space)
        name = None if space == NOBODY else space_name(space)
        if self.trace is not None:
            self.say(f"assert pool.prefix.flush({name!r}) == {due}")
        n = self.pool.prefix.flush(name)
        if n != due:
            self.fail(f"flush({name!r}) made {n} blocks blank, not {due}")
        return 0

    cdef int note_events(self) except -1:
        """Nodes that came and went get the keys that consumers know them by."""
        cdef const Told* told
        cdef int64_t at, k, bs = self.b.block_size
        while self.seen_events < self.b.events_made:
            at = self.seen_events % self.b.event_room
            told = &self.b.event[at]
            self.seen_events += 1
            if told.kind == E_CLEARED:
                event = ("cleared", None if told.space == NOBODY else space_name(told.space))
            elif told.kind == E_REMOVED:
                event = ("removed", self.keys.pop(told.node))
            else:
                tokens = [self.b.event_tokens[at * bs + k] for k in range(bs)]
                name = space_name(told.space)
                above = self.keys[told.parent] if told.parent else None
                content = (above or hashlib.sha256(name).digest()[:16]) + np.array(tokens, "<i4").tobytes()
                self.keys[told.node] = key = hashlib.sha256(content).digest()[:16]
                event = ("stored", key, above, tokens, bs, name)
            self.lost_events += len(self.events) == self.events.maxlen
            self.events.append(event)
        return 0

    cdef int op_events(self) except -1:
        return self.check_events() if self.b.event_room else self.nothing()

    cdef int check_events(self) except -1:
        """What consumers are told: everything that came and went, in order, or how much of it was lost."""
        due = ([("lost", self.lost_events)] if self.lost_events else []) + list(self.events)
        if self.trace is not None:
            self.trace.append(f"assert pool.prefix.events() == {due}")
        found = self.pool.prefix.events()
        self.events.clear()
        self.lost_events = 0
        for one, other in zip(found, due):
            if one != other:
                self.fail(f"event {one}, not {other}")
        if len(found) != len(due):
            self.fail(f"{len(found)} events, not {len(due)}")
        return 0

    cdef int op_ranks(self, const Word* w) except -1:
        """Two new pools that are told different tokens, or to forget different namespaces, tell so by their digests."""
        if not self.indexed or not self.full:
            return self.nothing()
        if self.trace is not None:
            self.trace.append(f"pool.ranks({w.a}, {w.b})")
        said = ranks_agree(type(self.pool), self.shape.pool, w.a, w.b)
        if said:
            self.fail(said)
        return 0
