"""The fuzzer's driver: random programs on one pool, judged after every call.

A program is a row of words ``(op, a, b, c)``, each a pure function of the run's seed and its place, and what a word
means depends on the state it meets: "a" may pick a sequence by its index among the open ones. So any part of a
program is a program, which is what shrinking needs. A run draws its pool and the weights of its operations first;
some operations are off (Groce et al., *Swarm Testing*, 2012).

The driver calls the pool as Python does (`full`: everything is checked after every call) or, where speed is all that
counts, steps below the reading of arguments. The judges are in `_shadow`, steps in `_fuzz_steps`, opening in
`_fuzz_base`.
"""
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from kvpool._args cimport Ints
from kvpool._blocks cimport Block
from kvpool._pool cimport Pool
from kvpool._prefix cimport Match
from kvpool._refuse cimport refuse
from kvpool._types cimport OK, Verdict
from kvpool.testing._fuzz_base cimport (
    ALLOC,
    CAN,
    CLOSE,
    CLOSE_BATCH,
    COMMIT,
    COMPACT,
    DECREF,
    DEFER,
    DONE,
    DONE_ANY,
    EVICT,
    EXECUTE,
    FLUSH,
    FORK,
    INCREF,
    LEAVE,
    MARK,
    MATCH,
    MISUSE,
    OPEN,
    PIN,
    PROMPT,
    RESERVE,
    RESET,
    REVIVE,
    ROLLBACK,
    S_EVICTED,
    S_LIMBO,
    STEP,
    TRUNCATE,
    UNSHARE,
    V_OK,
    Word,
    hash64,
    space_of,
)
from kvpool.testing._fuzz_evict cimport Evictions
from kvpool.testing._shadow cimport Line, line_stamp, line_table, line_token, shadow_observe, shadow_poison

from kvpool import errors
from kvpool.testing.fuzz_misuse import MISUSES, Facts
from kvpool.testing.fuzz_shape import OPERATIONS, SPACES, STATES, FuzzFinding

REFUSALS = (errors.KVPoolError, ValueError)


def blank_blocks(Pool pool):
    """Ids of the blocks that are free: whoever still reads one of them reads what anybody may overwrite."""
    return [pool.blocks.blank[k] for k in range(pool.blocks.num_blank)]


cdef class Driver(Evictions):
    """One run: one pool, its plans, and what is known about them.

    Parameters
    ----------
    shape : kvpool.testing.fuzz_shape.Shape
        Pool, plans, weights and appetite.
    make_pool : callable, optional
        Called with the keyword arguments of `kvpool.Pool`; returns a `kvpool.Pool` or one of a subclass.
    trace : list, optional
        Gets the calls as lines of Python.
    """

    # -- running

    cdef void draw(self, int64_t at, Word* w) noexcept nogil:
        cdef uint64_t h = hash64(self.seed + <uint64_t>at * 0x9E3779B97F4A7C15ULL)
        cdef uint64_t more = hash64(h ^ 0xD1B54A32D192ED03ULL)
        w.op = self.dice[h & 255]
        w.a = <uint32_t>(h >> 32)
        w.b = <uint32_t>more
        w.c = <uint32_t>(more >> 32)

    def words(self, int64_t first, int64_t n):
        """Words `first` .. `first + n - 1` of the program: a list of ``(op, a, b, c)``."""
        cdef Word w
        cdef int64_t at
        found = []
        for at in range(first, first + n):
            self.draw(at, &w)
            found.append((w.op, w.a, w.b, w.c))
        return found

    def run(self, int64_t n, int64_t check_every=1):
        """The next `n` calls of the program; every `check_every`-th is followed by the full check."""
        cdef Word w
        cdef int64_t k
        try:
            for k in range(n):
                if k & 0xFFF == 0:
                    PyErr_CheckSignals()            # no Python code runs here that would; 2 ms without checks
                self.draw(self.next_call, &w)
                self.next_call += 1
                self.apply(&w)
                if not self.full and (k + 1) % check_every == 0:
                    self.settle_all()
                    self.check()
        except FuzzFinding as finding:
            finding.call = self.next_call - 1
            raise

    def replay(self, words):
        """Calls of a program that is given."""
        cdef Word w
        try:
            for w.op, w.a, w.b, w.c in words:
                self.next_call += 1
                self.apply(&w)
        except FuzzFinding as finding:
            finding.call = self.next_call - 1
            raise

    def audit(self):
        """Let every pending plan pass, then check all there is to check, the pool's own check included."""
        self.settle_all()
        if self.full:
            self.observe()
        else:
            self.check()
        self.pool.check()

    def results(self):
        """Calls by operation and states by name, so far."""
        return ({name: self.calls[i] for i, name in enumerate(OPERATIONS)},
                {name: self.states[i] for i, name in enumerate(STATES)})

    def calls_made(self):
        """Calls so far, without the words that met nothing to call."""
        return self.next_call - self.idle

    def digest(self):
        """The pool's digest."""
        return self.pool.digest()

    def fingerprint(self):
        """The pool's fingerprint."""
        return self.pool.fingerprint()

    cdef int observe(self) except -1:
        shadow_observe(&self.s, &self.pool.blocks)
        self.states[S_LIMBO] += self.pool.blocks.limbo.size > 0
        return self.check()

    cdef int apply(self, const Word* w) except -1:
        """One call, and what is checked after it."""
        cdef int32_t k, top
        cdef uint32_t op = self.eased(w)
        self.s.clock += 1
        self.salt = (w.a ^ w.b ^ w.c) % 3
        self.calls[op] += 1
        self.op = op
        self.due = None
        if op == STEP or op == RESERVE:
            self.op_step(w, op == STEP)
        elif op == DONE or op == DONE_ANY:
            self.op_done(w, op == DONE_ANY)
        elif op <= PROMPT or op == PIN:
            self.op_open(w, op != OPEN, op == PIN)
        elif op <= DEFER:
            self.on_sequences(w, op)
        elif op == UNSHARE:
            self.op_unshare(w)
        elif op == COMPACT:
            self.op_compact(w)
        elif op == LEAVE:
            self.op_leave(w)
        elif op <= FLUSH:
            self.on_pool(w, op)
        else:
            self.on_blocks(w, op)
        if self.full:
            return self.observe()
        top = self.pool.blocks.num_blank
        for k in range(self.s.low_blank, top):
            shadow_poison(&self.s, self.pool.blocks.blank[k])
        self.s.low_blank = top
        return 0

    cdef uint32_t eased(self, const Word* w) noexcept:
        """The word's operation; another where it has nothing to do, mostly one that makes room where all is taken."""
        cdef uint32_t op = w.op
        if self.s.num_queue == 0 and (op == DONE or op == DONE_ANY or op == EXECUTE or op == ROLLBACK):
            return STEP
        if self.s.num_live == self.s.max_seqs and w.c >> 29 and (op <= PROMPT or op == FORK or op == PIN):
            return CLOSE
        if (op == STEP or op == PROMPT) and w.c >> 30 and (
                self.pool.blocks.num_blank + self.pool.blocks.lru.size == 0):
            return DONE if self.s.num_queue and w.c >> 31 else CLOSE
        return op

    cdef int on_sequences(self, const Word* w, uint32_t op) except -1:
        if self.s.num_live == 0:
            return self.op_open(w, False, False)
        if op == FORK:
            return self.op_fork(w)
        if op == TRUNCATE:
            return self.op_truncate(w)
        return self.op_close(w, op)

    cdef int on_pool(self, const Word* w, uint32_t op) except -1:
        if op == EXECUTE:
            return self.op_execute()
        if op == ROLLBACK:
            return self.op_rollback(w)
        if op == COMMIT:
            return self.op_commit(w)
        if op == MATCH:
            return self.op_match(w)
        if op == EVICT:
            return self.op_evict(w)
        return self.op_flush(w)

    cdef int on_blocks(self, const Word* w, uint32_t op) except -1:
        if op == ALLOC:
            return self.op_alloc(w)
        if op == CAN:
            return self.op_can(w)
        if op == RESET:
            return self.op_reset()
        if op == MISUSE:
            return self.op_misuse(w)
        return self.op_reference(w, op)

    # -- sequences

    cdef int op_fork(self, const Word* w) except -1:
        cdef int32_t parent = self.s.live[self.pick(w.b)], n = w.a % 4, i, slot
        cdef Line* p = &self.s.line[parent]
        cdef Line* line
        cdef int64_t done = self.done_length(p), bs = self.s.block_size
        self.expect(errors.OutOfSequences if n > self.s.max_seqs - self.s.num_live else None)
        if self.due is not None and not self.full:
            return self.nothing()
        if self.trace is not None:
            names = [f"h{len(self.names) + i}" for i in range(n)]
            self.say(f"[{', '.join(names)}] = pool.fork({self.names[p.handle]}, {n}).tolist()")
        try:
            if self.full:
                children = self.do_fork(p.handle, n)
                for i in range(n):
                    self.made[i] = children[i]
            else:
                self.direct_fork(parent, n)
        except REFUSALS as error:
            return self.refused(error)
        self.accepted("fork")
        for i in range(n):
            line = self.register(self.made[i], p.length, <int32_t>((p.length + bs - 1) // bs))
            slot = <int32_t>(line - self.s.line)
            for k in range(line.blocks):
                if line_table(&self.s, slot)[k] != line_table(&self.s, parent)[k]:
                    self.fail(f"a fork has block {line_table(&self.s, slot)[k]} at {k}, its parent "
                              f"{line_table(&self.s, parent)[k]}")
            memcpy(line_stamp(&self.s, slot), line_stamp(&self.s, parent), p.known * sizeof(uint64_t))
            memcpy(line_token(&self.s, slot), line_token(&self.s, parent), p.known * sizeof(int32_t))
            line.known = p.known
            line.evicted = p.evicted
            line.point = p.point
            line.committed = p.committed
            line.done = done
            line.space = p.space
            line.inherit = max(p.row_step, p.inherit)
            if line.inherit < self.oldest():
                line.inherit = 0
            self.newest_inherit = max(self.newest_inherit, line.inherit)
        return 0

    cdef int direct_fork(self, int32_t parent, int64_t n) except -1:
        """What `Pool.fork` does once it has read its arguments."""
        cdef Verdict v
        cdef int status
        self.pool.lock("fork")
        status = self.pool.make_children(self.s.line[parent].handle, n, self.made, &v)
        self.pool.unlock()
        if status != OK:
            refuse("fork", &v)
        return 0

    cdef int op_truncate(self, const Word* w) except -1:
        cdef int32_t slot = self.s.live[self.pick(w.b)]
        cdef Line* line = &self.s.line[slot]
        cdef int64_t n = w.a % <uint64_t>(line.length + 2), bs = self.s.block_size
        if not self.full:
            n = line.length - min(n % 4, line.length)
        self.expect(ValueError if n > line.length or n + line.evicted < line.point else
                    errors.PlanStateError if line.row_step >= self.oldest() else None)
        if self.due is not None and not self.full:
            return self.nothing()
        if self.trace is not None:
            self.say(f"pool.truncate({self.names[line.handle]}, {n + line.evicted})")
        try:
            self.do_truncate(line.handle, n + line.evicted)
        except REFUSALS as error:
            return self.refused(error)
        self.accepted("truncate")
        line.length = n
        line.known = <int32_t>n
        line.blocks = min(line.blocks, <int32_t>((n + bs - 1) // bs))
        line.committed = min(line.committed, n)
        line.done = min(line.done, n)
        line.forked_at = min(line.forked_at, n)
        return 0

    cdef int op_close(self, const Word* w, uint32_t op) except -1:
        """One sequence, or neighbours by `close` or `close_finished`, or one by a finalizer."""
        cdef int32_t n = 1, first = self.pick(w.b), i
        if op == CLOSE_BATCH:
            n = min(1 + w.a % 3, self.s.num_live, self.shape.max_rows)
        for i in range(n):
            self.rows[i] = self.s.live[(first + i) % self.s.num_live]
            self.handle[i] = self.s.line[self.rows[i]].handle
        if self.trace is not None:
            if op == CLOSE_BATCH and w.c & 1:
                self.say(f"pool.close_finished({self.names_of(n)}, {[True] * n})")
            elif op == DEFER:
                self.say(f"pool.defer_close({self.names[self.handle[0]]})")
            else:
                self.say(f"pool.close({self.names_of(n)})")
        if op == CLOSE_BATCH and w.c & 1:
            self.pool.close_finished(self.handles[:n], [True] * n)
        elif op == CLOSE_BATCH:
            self.do_close(self.handles[:n])
        elif op == DEFER:
            self.pool.defer_close(self.handle[0])
            self.pool.lock("num_free")              # the next call closes it
            self.pool.unlock()
        else:
            self.do_close(self.handle[0])
        for i in range(n):
            self.forget(self.rows[i])
        return 0

    # -- prefix cache

    cdef int op_commit(self, const Word* w) except -1:
        """Make tokens known that are done; now and then one that is not."""
        cdef int32_t slot
        cdef Line* line
        cdef int64_t most, n
        if not self.indexed or self.s.num_live == 0:
            return self.nothing()
        slot = self.s.live[self.pick(w.b)]
        line = &self.s.line[slot]
        most = self.done_length(line) - line.committed
        n = most if w.a >> 29 or not self.full else w.a % <uint64_t>(most + 2)
        self.expect(ValueError if n > most or (n and line.evicted) else None)
        if self.due is not None and not self.full:
            return self.nothing()
        memcpy(self.text, line_token(&self.s, slot) + line.committed, min(n, most) * sizeof(int32_t))
        if self.trace is not None:
            self.say(f"pool.commit({self.names[line.handle]}, {self.prompt[:n].tolist()})")
        try:
            if self.full:
                self.do_commit(line.handle, self.prompt[:n])
            else:
                self.direct_commit(line.handle, n)
        except REFUSALS as error:
            return self.refused(error)
        self.accepted("commit")
        line.committed += n
        return 0

    cdef int direct_commit(self, int64_t handle, int64_t n) except -1:
        """What `Pool.commit` does once it has read its arguments."""
        cdef Ints rows, counts, tokens
        cdef Verdict v
        cdef int status
        rows.data, rows.size, rows.width = &handle, 1, 8
        counts.data, counts.size = NULL, -1
        tokens.data, tokens.size, tokens.width = self.text, n, 4
        self.pool.lock("commit")
        status = self.pool.commit_all(&rows, &counts, &tokens, True, &v)
        self.pool.unlock()
        if status != OK:
            refuse("commit", &v)
        return 0

    cdef int op_match(self, const Word* w) except -1:
        cdef int32_t n
        cdef Match hit
        cdef uint64_t digest = self.pool.blocks.digest
        if not self.indexed:
            return self.nothing()
        n = self.make_prompt(w)
        hit = self.cached(n, SPACES[space_of(w)], True)
        if n > self.s.capacity:
            return self.nothing()
        if self.trace is not None:
            self.trace.append(f"assert pool.match({self.prompt[:n].tolist()}, {SPACES[space_of(w)]!r}) == "
                              f"{hit.blocks * self.s.block_size}")
        found = self.pool.match(self.prompt[:n], SPACES[space_of(w)])
        if found != hit.blocks * self.s.block_size:
            self.fail(f"match found {found} tokens, the index has {hit.blocks} blocks")
        if digest != self.pool.blocks.digest:
            self.fail("match changed the digest")
        return 0

    cdef int op_evict(self, const Word* w) except -1:
        cdef int64_t due = min(w.a % 4, self.pool.blocks.lru.size)
        if self.trace is not None:
            self.say(f"assert pool.evict({w.a % 4}) == {due}")
        n = self.pool.evict(w.a % 4)
        if n != due:
            self.fail(f"evict({w.a % 4}) cleared {n} blocks, not {due}")
        self.states[S_EVICTED] += n
        return 0

    cdef int op_flush(self, const Word* w) except -1:
        if not self.indexed:
            return self.nothing()
        space = None if w.a % 4 == 3 else SPACES[w.a % 4]
        if self.trace is not None:
            self.say(f"pool.flush({space!r})")
        self.pool.flush(space)
        return 0

    # -- blocks

    cdef int op_alloc(self, const Word* w) except -1:
        """Blocks of the caller's own; he writes into them at once, whatever is pending."""
        cdef int64_t n = w.a % 4, k, slot, bs = self.s.block_size
        cdef int32_t block
        self.expect(errors.OutOfBlocks if n > self.pool.blocks.num_blank + self.pool.blocks.lru.size else None)
        if self.trace is not None:
            self.say(f"pool.alloc({n})")
        try:
            self.pool.alloc(n, out=self.ids)
        except REFUSALS as error:
            return self.refused(error)
        self.accepted("alloc")
        for k in range(n):
            block = self.id[k]
            if block < self.s.reserved or block >= self.s.num_blocks or self.s.raw[block]:
                self.fail(f"alloc gave block {block}")
            self.s.raw[block] = 1
            for slot in range(block * bs, block * bs + bs):
                self.s.real[slot] = hash64(<uint64_t>self.s.clock << 20 | <uint64_t>slot)
                if self.full:
                    self.s.virt[slot] = self.s.raw_stamp[slot] = self.s.real[slot]
        return 0

    cdef int32_t find_block(self, uint32_t start, uint32_t op) noexcept:
        """A block that the call is most likely legal for, -1 if none is near; a miss in a large pool is slow."""
        cdef int64_t k, at, n = self.s.num_blocks - self.s.reserved, near = 64 if self.full else 8
        cdef const Block* block
        for k in range(min(n, near)):
            at = self.s.reserved + (start + k) % n
            block = &self.pool.blocks.block[at]
            if (self.s.raw[at] if op == DECREF else block.committed if op == REVIVE else block.refcount):
                return <int32_t>at
        return -1

    cdef int op_reference(self, const Word* w, uint32_t op) except -1:
        """References of block-level calls: incref, decref or free, mark_committed, revive; and take_dropped."""
        cdef int32_t i = self.find_block(w.a, op)
        cdef const Block* block
        if op > REVIVE:
            if self.indexed:
                return self.nothing()
            if self.trace is not None:
                self.say("pool.take_dropped()")
            self.pool.take_dropped()
            return 0
        if i < 0 or (self.indexed and op >= MARK):
            return self.nothing()
        block = &self.pool.blocks.block[i]
        last = op == DECREF and w.b & 1
        call = "free" if last else OPERATIONS[op]
        self.expect(ValueError if (last and block.refcount > 1) or (op == MARK and block.noted) else None)
        if self.due is not None and not self.full:
            return self.nothing()
        if self.trace is not None:
            self.say(f"pool.{call}({i})")
        try:
            getattr(self.pool, call)(i)
        except REFUSALS as error:
            return self.refused(error)
        self.accepted(call)
        if op == MARK:
            return 0
        if op == DECREF:
            self.s.raw[i] -= 1
            return 0
        if self.s.raw[i] == 0 and self.full:        # what it holds now has to stay
            memcpy(self.s.raw_stamp + i * self.s.block_size, self.s.virt + i * self.s.block_size,
                   self.s.block_size * sizeof(uint64_t))
        self.s.raw[i] += 1
        return 0

    # -- the rest

    cdef int op_can(self, const Word* w) except -1:
        cdef int32_t n
        if self.s.num_live == 0 or not self.full:
            return self.nothing()
        n = self.choose_rows(w)
        due = self.judge_batch(n, 1 << 30, True, False) == V_OK
        if self.trace is not None:
            self.trace.append(f"assert pool.can({self.names_of(n)}, {self.counts[:n].tolist()}) is {due}")
        if self.pool.can(self.handles[:n], self.counts[:n]) != due:
            self.fail(f"can() says {not due}")
        return 0

    cdef int op_reset(self) except -1:
        cdef int32_t i
        if self.trace is not None:
            self.say("pool.reset()")
        self.pool.reset()
        while self.s.num_live:
            self.forget(self.s.live[0])
        while self.s.num_queue:
            self.leave_queue(0)
        for i in range(self.s.num_blocks):
            self.s.raw[i] = 0
        return 0

    cdef int op_misuse(self, const Word* w) except -1:
        """A call that must be refused whatever the state, by the exception that is documented for it."""
        cdef int32_t i
        live = [self.s.line[self.s.live[i]].handle for i in range(min(self.s.num_live, 4))]
        stale = [self.stale[i] for i in range(min(self.num_stale, 8))]
        queue = [self.plans[self.s.queue[i]] for i in range(self.s.num_queue)]
        idle = [plan for plan in self.plans if plan not in queue]
        facts = Facts(self.pool, live, [h for h in stale if not self.pool.is_open(h)], queue, idle, w.b, w.c)
        error, attempt = MISUSES[w.a % len(MISUSES)](facts)
        if error is None:
            return self.nothing()
        self.expect(error)
        if self.trace is not None:
            self.trace.append(f"pool.misuse({MISUSES[w.a % len(MISUSES)].__name__!r}, {w.b}, {w.c})")
        try:
            attempt()
        except error as raised:
            return self.refused(raised)
        return self.accepted(f"misuse {MISUSES[w.a % len(MISUSES)].__name__}")
