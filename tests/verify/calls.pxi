"""How calls are made and their results read: all that touches the pool or a plan, but for rare methods.

Steps of a sound `kvpool.Pool` are taken below the reading of arguments: they are a third of all calls. All other calls
are made by the methods of Python, and so are steps of a subclass, which may have a planted fault, or of a traced run.
"""

cdef const int32_t* pool_ids(Pool pool, int32_t slot, int32_t g, int32_t* n) noexcept nogil:
    """The table of a row in a group, as `Pool.table` returns it."""
    cdef const LayerGroup* group = &pool.state.groups.group[g]
    n[0] = entries_of(group, slot, pool.state.seqs.seq[slot].num_blocks) * group.columns
    return group_row(group, slot)


cdef inline int64_t get(const Field* f, int64_t i) noexcept nogil:
    return (<int32_t*>f.data)[i] if f.width == 4 else (<int64_t*>f.data)[i]


cdef class Calls(Content):
    cdef readonly object shape
    cdef list trace
    cdef bint direct
    cdef object prefix, blocks
    cdef object keep            # what the next prompt or commit is told
    cdef object ttl             # and the next pin
    cdef list pins              # (end, how many rows were opened before, handle) of those that had a ttl
    cdef int64_t now
    cdef int32_t[CAP] prompt
    cdef int32_t[MOST_ROWS] rows
    cdef int64_t[MOST_ROWS] handles
    cdef int64_t[MOST_ROWS] counts
    cdef int32_t num_rows
    cdef int32_t[MOST_PLANS] max_rows, max_tokens
    cdef int64_t calls_now, refused_now
    cdef int reason             # of the last refusal, OK: there was none

    cdef object arena(self, int32_t a):
        return self.blocks.arena(a) if a else self.blocks

    cdef object call(self, str name, object method, tuple given, dict options={}):
        """Call a method; None if it is refused."""
        self.calls_now += 1
        if self.trace is not None:
            shown = [f"plans[{self.plans.index(one)}]" if isinstance(one, Plan) else repr(one) for one in given]
            said = f"{name}({', '.join([*shown, *(f'{k}={v!r}' for k, v in options.items())])})"
        try:
            self.reason = OK
            found = method(*given, **options)
        except REFUSALS as error:
            self.reason = OUT_OF_BLOCKS if isinstance(error, errors.OutOfBlocks) else -1
            self.refused_now += 1
            if self.trace is not None:
                self.trace.append(f"{said}  # {type(error).__name__}: {error}")
            return None
        if self.trace is not None:
            shown = found.tolist() if hasattr(found, "tolist") else found
            self.trace.append(f"{said}  # {shown}" if found is not None else said)
        return True if found is None else found

    cdef bint call_step(self, int32_t k, int32_t n, bint advance, bint partial, bint padded) except -1:
        """`rows` step by `counts` in plan k."""
        cdef Ints rows, new
        cdef Verdict v
        cdef Plan plan = self.plans[k]
        cdef int32_t i
        cdef int status
        if self.direct and n <= self.max_rows[k]:
            rows.data, rows.size, rows.width = self.handles, n, 8
            new.data, new.size, new.width = self.counts, n, 8
            self.pool.keep_plan(plan)
            pool_enter(&self.pool.state, "step")
            status = pool_step(&self.pool.state, plan, &rows, &new, advance, partial,
                               plan.step.max_rows if padded else 0, self.max_tokens[k] if padded else -1, &v)
            pool_leave(&self.pool.state)
            if status != OK:
                self.pool.let_go_of_plan(plan)
            self.calls_now += 1
            self.refused_now += status != OK
            self.reason = status
            return status == OK
        given = (plan, [self.handles[i] for i in range(n)], [self.counts[i] for i in range(n)])
        if not advance:
            return self.call("pool.reserve", self.pool.reserve, given) is not None
        options = {"partial": True} if partial else {}
        if padded:
            options["pad_to"] = (plan.step.max_rows, self.max_tokens[k])
        return self.call("pool.step", self.pool.step, given, options) is not None

    cdef int64_t call_open(self, int64_t n, bint counted, int32_t space, int64_t cut, bint reserve) except -2:
        """A new sequence for `n` tokens, those of the prompt or a count. Returns its handle, or -1."""
        options = {"namespace": SPACES[space]} if space else {}
        options |= {"cut": cut} if cut >= 0 else {}
        options |= {} if reserve else {"reserve": False}
        options |= self.kept()
        given = self.call("pool.open", self.pool.open, (n if counted else self.said(n),), options)
        return -1 if given is None else given

    cdef list said(self, int64_t n):
        return [self.prompt[k] for k in range(n)]

    cdef bint call_close(self, int32_t n) except -1:
        """Close the first of `handles`."""
        cdef int32_t i
        given = [self.handles[i] for i in range(n)]
        return self.call("pool.close", self.pool.close, (given if n > 1 else given[0],)) is not None

    cdef bint call_commit(self, const Row* r, int64_t end) except -1:
        """The tokens of a row up to `end`."""
        cdef int64_t k
        tokens = [r.token[k] for k in range(r.committed, end)]
        return self.call("pool.prefix.commit", self.prefix.commit, (r.handle, tokens), self.kept()) is not None

    cdef dict kept(self):
        return {} if self.keep is None else {"keep": self.keep}

    # -- plans

    cdef void show(self, int32_t k) noexcept:
        """Where the arrays of a plan are."""
        cdef Plan plan = self.plans[k]
        cdef const StepPart* part
        cdef Shown* s
        cdef int32_t g
        for g in range(self.num_groups):
            s = &self.shown[k][g]
            memset(s, 0, sizeof(Shown))
            part = plan.part[g]
            s.tables, s.width = <const int32_t*>part.wire.field[BLOCK_TABLES].data, part.wire.table_width
            s.slots, s.stride = <const int32_t*>part.wire.field[SLOT_MAPPING].data, part.shown_tokens
            s.copies, s.num_copies = part.copies, part.num_copies
            s.dirty, s.num_dirty = part.wire.dirty, part.wire.num_dirty
            s.lens, s.starts = <const int32_t*>part.wire.field[SEQ_LENS].data, part.kv_starts
            s.src, s.dst = part.state_src, part.state_dst
            s.loads, s.num_loads, s.saves, s.num_saves = part.loads, part.num_loads, part.saves, part.num_saves

    cdef int check_formats(self, Plan plan, const Work* w) except -1:
        """The arrays that say the same in another way."""
        cdef const Field* field = plan.field
        cdef int32_t i, p, t = 0, g
        for i in range(self.num_rows):
            for p in range(w.old[i], w.new[i]):
                if get(&field[POSITIONS], t) != p:
                    self.wrong("positions[{0}] is {1}, not {2}", t, get(&field[POSITIONS], t), p)
                t += 1
            if field[SLOT_IDS].width and get(&field[SLOT_IDS], i) != self.rows[i]:
                self.wrong("slot_ids[{0}] is {1}, not {2}", i, get(&field[SLOT_IDS], i), self.rows[i])
        if get(&field[CU_Q_LENS], self.num_rows) != t or plan.step.num_tokens != t:
            self.wrong("a plan has {0} tokens, not {1}", plan.step.num_tokens, t)
        for i in range(self.num_rows, plan.shown_rows):
            if get(&field[CU_Q_LENS], i + 1) != t:
                self.wrong("padded row {0} is not empty", i)
        for g in range(self.num_groups):
            self.check_group(plan, g, w)
        return 0

    cdef int check_group(self, Plan plan, int32_t g, const Work* w) except -1:
        """Lengths, CSR and padding of a group."""
        cdef const StepPart* part = plan.part[g]
        cdef const Field* field = part.wire.field
        cdef const Layer* layer = &self.group[g]
        cdef int32_t i, j, k, first, slot, length, entries, id
        for i in range(self.num_rows):
            slot, first = self.rows[i], 0
            length = w.new[i] - self.row[slot].lost[g]
            if get(&field[SEQ_LENS], i) != length:
                self.wrong("group {0}: seq_lens[{1}] is {2}, not {3}", g, i, get(&field[SEQ_LENS], i), length)
            if field[INDPTR].width == 0:
                continue
            first = <int32_t>get(&field[INDPTR], i)
            entries = <int32_t>get(&field[INDPTR], i + 1) - first
            k = 0
            for j in range((length + layer.size - 1) // layer.size * layer.columns):
                id = <int32_t>get(&field[BLOCK_TABLES], <int64_t>i * part.wire.table_width + j)
                if id == (0 if self.reserved else -1):
                    continue
                if k >= entries * layer.columns or get(&field[INDICES], first * layer.columns + k) != id:
                    self.wrong("group {0}: row {1} of indices differs at {2}", g, i, k)
                k += 1
            if k != entries * layer.columns:
                self.wrong("group {0}: row {1} of indices has {2} entries", g, i, entries)
        for i in range(self.num_rows, plan.shown_rows):
            if get(&field[SEQ_LENS], i):
                self.wrong("group {0}: padded row {1} is not empty", g, i)
        for i in range(<int32_t>plan.step.num_tokens, <int32_t>plan.shown_tokens):
            for j in range(layer.columns if layer.kind != STATE else 0):
                if get(&field[SLOT_MAPPING], j * part.shown_tokens + i) != -1:
                    self.wrong("group {0}: padded token {1} has a slot", g, i)
        return 0
