"""The content judge: a KV memory in which every slot says what it holds. It knows no rule by which a pool works.

A *stamp* is a 64-bit hash of a prefix: the namespace, how often that was flushed, and all tokens up to a position. A
cell of the memory (arena, block, offset) holds the stamp that was written there, mixed with its group and column. Each
row has the stamps of its own tokens, so "the row reads position p" has one right answer, whoever computed it.

The device executes plans in their order, as late as it likes, by the arrays of the plan as they are then: copies,
loads of states, writes, then every read that a query may make, then saves of states. It keeps tables of its own, in
which it replaces the dirty rows of a plan and no other. A block that is handed out is poisoned at once: who still
reads it gets poison. A plan that was rolled back leaves garbage wherever it was going to write, now or when the plans
before it are through.
"""

cdef enum:
    CAP = 160                   # tokens that a row may have
    MOST_GROUPS = 8
    MOST_ARENAS = 17
    MOST_PLANS = 4
    MOST_ROWS = 6
    MOST_SEQS = 12
    MOST_QUEUED = 64
    FULL = 0                    # Layer.kind, in the order of KINDS
    WINDOW = 1
    CHUNK = 2
    STATE = 3
    GARBAGE = -1                # Queued.plan: what a step left that was rolled back

cdef uint64_t ODD = 0x9E3779B97F4A7C15ULL
cdef uint64_t POISON = 0x0BADC0DE0BADC0DEULL


cdef struct Layer:              # a group
    int32_t kind
    int32_t reach               # W or C
    int32_t keep
    int32_t columns
    int32_t arena
    int32_t size                # tokens of a block
    int32_t bundle              # blocks of arena 0 that a state takes in a checkpoint
    int32_t width               # ids of a row: entries times columns


cdef struct Row:                # an open sequence, as its owner knows it
    int64_t handle              # -1: none
    int32_t n                   # tokens
    int32_t text                # tokens that are known; those behind n are still to be computed
    int32_t committed
    int32_t passed              # most tokens in a step that has passed
    int32_t point               # no query is made before this position: tokens left, or a hit ended here
    int32_t family              # which text it repeats, mostly; -1: one of its own
    int32_t space
    int32_t cut                 # no checkpoint is wanted behind it
    int32_t shared              # others may have committed blocks up to here
    int32_t reserved            # a step up to this length finds its blocks
    bint loading
    bint told                   # it has committed tokens
    bint fresh                  # the last commit, its first one, has published blocks
    bint copied                 # tables have copies of what was committed: publishing stops there
    bint mute                   # flushed, or tokens left: what it commits is no hit
    int64_t born                # work of the parent that was pending when it was forked
    int32_t born_done
    uint64_t root
    int32_t[CAP] token
    int32_t[MOST_GROUPS] lost   # tokens that left a group


cdef struct Shown:              # the arrays of a plan for one group, as a kernel gets them
    const int32_t* tables
    int32_t width
    const int32_t* slots
    int64_t stride
    const int32_t* copies
    int32_t num_copies
    const int32_t* dirty
    int32_t num_dirty
    const int32_t* lens
    const int32_t* starts
    const int32_t* src
    const int32_t* dst
    const int32_t* loads
    int32_t num_loads
    const int32_t* saves
    int32_t num_saves


cdef struct Work:               # a plan that is pending
    int64_t id
    int32_t rows
    bint noted
    bint executed
    int64_t[MOST_ROWS] handle
    int32_t[MOST_ROWS] old
    int32_t[MOST_ROWS] new
    int32_t[MOST_ROWS][MOST_GROUPS] lost
    uint64_t* line              # [rows, groups + 1, CAP] stamps by place, in groups that lost tokens; all stamps


cdef struct Queued:
    int32_t plan                # GARBAGE: cells that become garbage
    int32_t num_cells
    int64_t* cells              # arena << 40 | cell


cdef inline uint64_t mixed(uint64_t h, uint64_t more) noexcept nogil:
    h = (h ^ more) * ODD
    return h ^ (h >> 29)


cdef inline int32_t slot_of(int64_t handle) noexcept nogil:
    return <int32_t>(handle & 0xFFFFF)


cdef inline uint64_t mark(uint64_t stamp, int32_t group, int32_t column) noexcept nogil:
    """What a cell holds of a position in one column of one group."""
    return (stamp + <uint64_t>(64 * group + column + 1)) * ODD


cdef inline int32_t first_read(const Layer* g, int32_t position) noexcept nogil:
    """The first position, but for kept ones, that a query at a position reads."""
    if g.kind == WINDOW:
        return max(position - g.reach + 1, 0)
    return position // g.reach * g.reach if g.kind == CHUNK else 0


cdef class Content:
    cdef Pool pool
    cdef list plans
    cdef int32_t num_groups, num_kv, num_arenas, num_plans, max_seqs, reserved, lookahead, block_size
    cdef Layer[MOST_GROUPS] group
    cdef int32_t[MOST_ARENAS] num_blocks
    cdef int32_t[MOST_ARENAS] first_blocks      # as many as the pool was made with; there is memory for twice as many
    cdef int32_t[MOST_ARENAS] room      # cells of a block
    cdef (uint64_t*)[MOST_ARENAS] cell
    cdef Row* row                       # [max_seqs]
    cdef uint64_t* stamp                # [max_seqs, CAP]
    cdef uint64_t* line                 # [max_seqs, groups, CAP] stamps by place, of rows that lost tokens in the group
    cdef int32_t* seen                  # [max_seqs, groups, most_width] tables as they were when they were seen last
    cdef int32_t* num_seen              # [max_seqs, groups] ids of them
    cdef int32_t* mirror                # [plans, groups, MOST_ROWS, most_width] the device's tables
    cdef int32_t most_width
    cdef Work[MOST_PLANS] work
    cdef Queued[MOST_QUEUED] queue
    cdef int32_t num_queue, num_executed
    cdef int64_t next_work
    cdef Shown[MOST_PLANS][MOST_GROUPS] shown
    cdef int64_t reads, copies, late, garbage, hits

    def __dealloc__(self):
        cdef int32_t k
        for k in range(self.num_queue):
            free(self.queue[k].cells)
        for k in range(MOST_ARENAS):
            free(self.cell[k])
        for k in range(MOST_PLANS):
            free(self.work[k].line)
        free(self.row)
        free(self.stamp)
        free(self.line)
        free(self.seen)
        free(self.num_seen)
        free(self.mirror)

    cdef int init_content(self) except -1:
        """Groups and sizes are set."""
        cdef int32_t k, a
        cdef int64_t i
        for k in range(self.num_groups):
            a = self.group[k].arena
            self.room[a] = max(self.room[a], self.group[k].size)
            self.most_width = max(self.most_width, self.group[k].width)
        for a in range(self.num_arenas):
            self.room[a] = max(self.room[a], 1)
            self.first_blocks[a] = self.num_blocks[a]
            self.cell[a] = <uint64_t*>calloc(2 * self.num_blocks[a] * self.room[a], sizeof(uint64_t))
            for i in range(self.num_blocks[a] * self.room[a]):
                self.cell[a][i] = POISON
        self.row = <Row*>calloc(self.max_seqs, sizeof(Row))
        self.stamp = <uint64_t*>calloc(self.max_seqs * CAP, sizeof(uint64_t))
        self.line = <uint64_t*>calloc(self.max_seqs * self.num_groups * CAP, sizeof(uint64_t))
        self.seen = <int32_t*>calloc(self.max_seqs * self.num_groups * self.most_width, sizeof(int32_t))
        self.num_seen = <int32_t*>calloc(self.max_seqs * self.num_groups, sizeof(int32_t))
        self.mirror = <int32_t*>calloc(self.num_plans * self.num_groups * MOST_ROWS * self.most_width, sizeof(int32_t))
        for k in range(self.num_plans):
            self.work[k].line = <uint64_t*>calloc(MOST_ROWS * (self.num_groups + 1) * CAP, sizeof(uint64_t))
        for k in range(self.max_seqs):
            self.row[k].handle = -1
        return 0

    cdef int wrong(self, str what, int64_t a=0, int64_t b=0, int64_t c=0, int64_t d=0) except -1:
        raise Finding(what.format(a, b, c, d))

    # -- what rows are

    cdef inline int32_t* seen_of(self, int32_t slot, int32_t g) noexcept nogil:
        return self.seen + (slot * self.num_groups + g) * self.most_width

    cdef inline uint64_t* line_of(self, int32_t slot, int32_t g) noexcept nogil:
        """Stamps of what a row holds in a group, by place."""
        if self.row[slot].lost[g] == 0:
            return self.stamp + slot * CAP
        return self.line + (slot * self.num_groups + g) * CAP

    cdef void extend(self, int32_t slot, int32_t length) noexcept nogil:
        """The row has the tokens up to a length; they are known."""
        cdef Row* r = &self.row[slot]
        cdef uint64_t* stamp = self.stamp + slot * CAP
        cdef int32_t g, p
        for p in range(r.n, length):
            stamp[p] = mixed(stamp[p - 1] if p else r.root, <uint64_t>(r.token[p] + 1))
            for g in range(self.num_groups):
                if r.lost[g]:
                    self.line_of(slot, g)[p - r.lost[g]] = stamp[p]
        r.n = length

    cdef int32_t see_tables(self, int32_t slot, int32_t first, bint new) noexcept nogil:
        """See the tables of a row. `new`: blocks from position `first` on that were not there were handed out.

        Those are poisoned: who has still to read one gets poison. Returns how many are of arena 0.
        """
        cdef int32_t g, i, n, known, begin, taken = 0
        cdef int32_t* seen
        cdef const int32_t* ids
        for g in range(self.num_groups):
            if self.group[g].kind == STATE:
                continue
            seen, ids = self.seen_of(slot, g), pool_ids(self.pool, slot, g, &n)
            n, known = min(n, self.group[g].width), self.num_seen[slot * self.num_groups + g]
            begin = first // self.group[g].size * self.group[g].columns
            for i in range(n):
                if i >= known or ids[i] != seen[i]:
                    if new and i >= begin and ids[i] >= self.reserved:
                        self.poison(self.group[g].arena, ids[i])
                        taken += self.group[g].arena == 0
                    seen[i] = ids[i]
            self.num_seen[slot * self.num_groups + g] = n
        return taken

    cdef inline void poison(self, int32_t a, int32_t block) noexcept nogil:
        cdef int32_t k
        for k in range(self.room[a]):
            self.cell[a][block * self.room[a] + k] = POISON

    cdef int read(self, int32_t g, const int32_t* ids, const uint64_t* line, int32_t first, int32_t end, str who,
                  int64_t name) except -1:
        """Positions first .. end - 1 of a group must be what the row has there."""
        cdef const Layer* layer = &self.group[g]
        cdef const uint64_t* cell = self.cell[layer.arena]
        cdef int32_t room = self.room[layer.arena], columns = layer.columns, p, c, block, entry, offset
        if first >= end:
            return 0
        entry, offset = first // layer.size, first % layer.size
        for p in range(first, end):
            for c in range(columns):
                block = ids[entry * columns + c]
                if not self.reserved <= block < self.num_blocks[layer.arena]:
                    self.wrong("content: group {0}: " + who + " {1} reads position {2} in block {3}, which is none",
                               g, name, p, block)
                if cell[block * room + offset] != mark(line[p], g, c):
                    self.wrong("content: group {0}: " + who + " {1} does not read its own token at {2} in block {3}",
                               g, name, p, block)
            offset += 1
            if offset == layer.size:
                offset, entry = 0, entry + 1
        self.reads += (end - first) * columns
        return 0

    cdef int read_for(self, int32_t g, const int32_t* ids, const uint64_t* line, int32_t query, int32_t end, str who,
                      int64_t name) except -1:
        """All that queries from `query` on read of the first `end` positions."""
        cdef int32_t low = first_read(&self.group[g], max(query, 0))
        self.read(g, ids, line, 0, min(min(low, self.group[g].keep), end), who, name)
        return self.read(g, ids, line, low, end, who, name)

    cdef int read_row(self, int32_t slot, int32_t query) except -1:
        """Nothing that the row has is still to be written: it reads its own tokens, by the pool's tables."""
        cdef Row* r = &self.row[slot]
        cdef int32_t g, n
        cdef const int32_t* ids
        for g in range(self.num_groups):
            ids = pool_ids(self.pool, slot, g, &n)
            if self.group[g].kind != STATE:
                self.read_for(g, ids, self.line_of(slot, g), query, r.n - r.lost[g], "sequence", r.handle)
        return 0

    # -- plans

    cdef int issued(self, int32_t k, const int32_t* slots, int32_t rows) except -1:
        """Plan k was filled for these rows, whose tokens were extended: note what it has to read."""
        cdef Work* w = &self.work[k]
        cdef Row* r
        cdef const Shown* shown
        cdef int32_t i, g, b
        w.id, w.rows, w.noted, w.executed = self.next_work, rows, False, False
        self.next_work += 1
        for g in range(self.num_groups):
            shown = &self.shown[k][g]
            for i in range(shown.num_saves):
                for b in range(self.group[g].bundle):
                    self.poison(0, shown.saves[i * (1 + self.group[g].bundle) + 1 + b])
        for i in range(rows):
            r = &self.row[slots[i]]
            w.handle[i] = r.handle
            for g in range(self.num_groups):
                w.lost[i][g] = r.lost[g]
                if r.lost[g]:
                    memcpy(w.line + (i * (self.num_groups + 1) + g) * CAP, self.line_of(slots[i], g),
                           (r.n - r.lost[g]) * sizeof(uint64_t))
            memcpy(w.line + (i * (self.num_groups + 1) + self.num_groups) * CAP, self.stamp + slots[i] * CAP,
                   r.n * sizeof(uint64_t))
        self.check_sources(k)
        if self.num_queue == MOST_QUEUED:
            self.wrong("the queue of the device is full")
        self.queue[self.num_queue].plan = k
        self.queue[self.num_queue].cells = NULL
        self.num_queue += 1
        return 0

    cdef int check_sources(self, int32_t k) except -1:
        """Plan k writes nothing that a copy of a pending plan reads: a device may make copies when it likes."""
        cdef const Shown* shown
        cdef const int32_t* copy
        cdef int32_t i, g, c, n, size
        cdef int64_t slot, t, tokens = 0
        for i in range(self.work[k].rows):
            tokens += self.work[k].new[i] - self.work[k].old[i]
        for i in range(self.num_queue):
            for g in range(self.num_groups if self.queue[i].plan != GARBAGE and tokens else 0):
                shown, size = &self.shown[self.queue[i].plan][g], self.group[g].size
                for n in range(shown.num_copies):
                    copy = shown.copies + 3 * n
                    for t in range(tokens * self.group[g].columns):
                        c = <int32_t>(t // tokens)
                        slot = self.shown[k][g].slots[c * self.shown[k][g].stride + t % tokens]
                        if slot // size == copy[0] and slot % size < copy[2]:
                            self.wrong("content: group {0}: slot {1} is written, which a pending copy of {2} tokens of "
                                       "block {3} reads", g, slot, copy[2], copy[0])
        return 0

    cdef int execute_next(self) except -1:
        """The device executes what is next in its queue."""
        cdef Queued* q = &self.queue[self.num_executed]
        self.num_executed += 1
        if q.plan != GARBAGE:
            return self.execute(q.plan)
        self.write_garbage(q)
        return 0

    cdef int execute(self, int32_t k) except -1:
        cdef Work* w = &self.work[k]
        cdef int32_t g
        w.executed = True
        self.late += w.id + 1 < self.next_work
        for g in range(self.num_groups):
            if self.group[g].kind == STATE:
                self.load_states(g, &self.shown[k][g])
            else:
                self.copy_blocks(g, &self.shown[k][g])
        for g in range(self.num_groups):
            if self.group[g].kind == STATE:
                self.run_states(g, w, &self.shown[k][g])
            else:
                self.write_tokens(g, w, &self.shown[k][g])
        for g in range(self.num_groups):
            if self.group[g].kind != STATE:
                self.read_tokens(k, g, w, &self.shown[k][g])
        for g in range(self.num_groups):
            self.save_states(g, &self.shown[k][g])
        return 0

    cdef int copy_blocks(self, int32_t g, const Shown* shown) except -1:
        cdef int32_t a = self.group[g].arena, room = self.room[a], i
        cdef const int32_t* copy = shown.copies
        for i in range(shown.num_copies):
            if not (self.reserved <= copy[0] < self.num_blocks[a] and self.reserved <= copy[1] < self.num_blocks[a]
                    and 0 < copy[2] <= self.group[g].size):
                self.wrong("content: group {0}: a copy of block {1} to {2} of {3} tokens", g, copy[0], copy[1], copy[2])
            memcpy(self.cell[a] + copy[1] * room, self.cell[a] + copy[0] * room, copy[2] * sizeof(uint64_t))
            copy += 3
        self.copies += shown.num_copies
        return 0

    cdef int write_tokens(self, int32_t g, const Work* w, const Shown* shown) except -1:
        cdef const Layer* layer = &self.group[g]
        cdef int32_t a = layer.arena, room = self.room[a], i, c, p
        cdef int64_t t = 0, slot
        cdef const uint64_t* line
        for i in range(w.rows):
            line = self.work_line(w, i, g)
            for p in range(w.old[i] - w.lost[i][g], w.new[i] - w.lost[i][g]):
                for c in range(layer.columns):
                    slot = shown.slots[c * shown.stride + t]
                    if not self.reserved * layer.size <= slot < self.num_blocks[a] * <int64_t>layer.size:
                        self.wrong("content: group {0}: token {1} of a plan is written to slot {2}", g, t, slot)
                    self.cell[a][slot // layer.size * room + slot % layer.size] = mark(line[p], g, c)
                t += 1
        return 0

    cdef inline const uint64_t* work_line(self, const Work* w, int32_t i, int32_t g) noexcept nogil:
        return w.line + (i * (self.num_groups + 1) + (g if w.lost[i][g] else self.num_groups)) * CAP

    cdef int read_tokens(self, int32_t k, int32_t g, const Work* w, const Shown* shown) except -1:
        """By the device's own tables, in which it has replaced the dirty rows."""
        cdef int32_t* mine = self.mirror + (k * self.num_groups + g) * MOST_ROWS * self.most_width
        cdef int32_t i, end, columns = self.group[g].columns, start, at
        for i in range(shown.num_dirty):
            memcpy(mine + shown.dirty[i] * self.most_width, shown.tables + <int64_t>shown.dirty[i] * shown.width,
                   min(shown.width, self.group[g].width) * sizeof(int32_t))
        for i in range(w.rows):
            end = w.new[i] - w.lost[i][g]
            if memcmp(mine + i * self.most_width, shown.tables + <int64_t>i * shown.width,
                      min(shown.width, self.group[g].width) * sizeof(int32_t)):
                self.wrong("group {0}: row {1} of block_tables has changed, and is not dirty", g, i)
            if shown.lens[i] != end:
                self.wrong("content: group {0}: row {1} of a plan has kv_len {2}, not {3}", g, i, shown.lens[i], end)
            self.read_for(g, mine + i * self.most_width, self.work_line(w, i, g), w.old[i] - w.lost[i][g], end,
                          "row", i)
            if shown.starts != NULL:
                start = shown.starts[i]
                for at in range((self.group[g].keep + self.group[g].size - 1) // self.group[g].size * columns,
                                start // self.group[g].size * columns):
                    if mine[i * self.most_width + at] != (0 if self.reserved else -1):
                        self.wrong("group {0}: row {1} of block_tables shows block {2}, which it has let go of", g, i,
                                   mine[i * self.most_width + at])
                if first_read(&self.group[g], w.old[i] - w.lost[i][g]) < start and end > start:
                    self.wrong("content: group {0}: kv_starts[{1}] is {2}, behind what its query reads", g, i, start)
                if start < end:
                    self.read(g, mine + i * self.most_width, self.work_line(w, i, g), start, end, "row", i)
        return 0

    # -- states

    cdef int load_states(self, int32_t g, const Shown* shown) except -1:
        cdef int32_t i, k, n = self.group[g].bundle
        cdef const int32_t* ids
        cdef uint64_t state
        for i in range(shown.num_loads):
            ids = shown.loads + i * (1 + n)
            if n == 0 or not 0 <= ids[0] < self.num_blocks[self.group[g].arena]:
                self.wrong("content: group {0}: state {1} is loaded from {2} blocks", g, ids[0], n)
            state = self.cell[0][ids[1] * self.room[0]]
            for k in range(1, n):
                if self.cell[0][ids[1 + k] * self.room[0]] != state + k * ODD:
                    state = POISON
            self.cell[self.group[g].arena][ids[0]] = state
        return 0

    cdef int run_states(self, int32_t g, const Work* w, const Shown* shown) except -1:
        """Every row reads its state before anybody writes one: rows run in any order."""
        cdef uint64_t* cell = self.cell[self.group[g].arena]
        cdef int32_t slots = self.num_blocks[self.group[g].arena], i, j, src, dst
        for i in range(w.rows):
            if w.new[i] == w.old[i]:
                continue
            src, dst = shown.src[i], shown.dst[i]
            if w.old[i] and (not 0 <= src < slots or cell[src] != mark(self.work_line(w, i, g)[w.old[i] - 1], g, 0)):
                self.wrong("content: group {0}: row {1} does not read its own state in slot {2}", g, i, src)
            if not 0 <= dst < slots:
                self.wrong("content: group {0}: row {1} writes its state to slot {2}", g, i, dst)
            for j in range(w.rows):
                if j != i and w.new[j] > w.old[j] and (dst == shown.dst[j] or dst == shown.src[j]):
                    self.wrong("content: group {0}: row {1} writes state {2}, which row {3} has", g, i, dst, j)
        for i in range(w.rows):
            if w.new[i] > w.old[i]:
                cell[shown.dst[i]] = mark(self.work_line(w, i, g)[w.new[i] - 1], g, 0)
        return 0

    cdef int save_states(self, int32_t g, const Shown* shown) except -1:
        cdef int32_t i, k, n = self.group[g].bundle
        cdef const int32_t* ids
        for i in range(shown.num_saves):
            ids = shown.saves + i * (1 + n)
            for k in range(n):
                if not self.reserved <= ids[1 + k] < self.num_blocks[0]:
                    self.wrong("content: a state is saved to block {0}", ids[1 + k])
                self.cell[0][ids[1 + k] * self.room[0]] = self.cell[self.group[g].arena][ids[0]] + k * ODD
        return 0

    # -- how plans end

    cdef int settle_queue(self) except -1:
        """All that is noted done passes, oldest first; garbage that waits for nothing more has happened."""
        cdef const Work* w
        cdef int32_t i
        cdef Row* r
        while self.num_queue and (self.queue[0].plan == GARBAGE or self.work[self.queue[0].plan].noted):
            if self.num_executed == 0:
                self.execute_next()
            w = &self.work[max(self.queue[0].plan, 0)]
            for i in range(w.rows if self.queue[0].plan != GARBAGE else 0):
                r = &self.row[slot_of(w.handle[i])]
                if r.handle == w.handle[i]:
                    r.passed = max(r.passed, min(w.new[i], r.n))
            self.unqueue(0)
            self.num_executed -= 1
        return 0

    cdef int undone(self, int32_t k, bint writes) except -1:
        """The newest plan was rolled back. `writes`: the device still begins it, and leaves garbage."""
        cdef Work* w = &self.work[k]
        cdef Queued* q
        cdef int32_t i, slot, at = self.num_queue - 1
        while self.queue[at].plan != k:
            at -= 1
        q = &self.queue[at]
        for i in range(w.rows):
            slot = slot_of(w.handle[i])
            if self.row[slot].handle == w.handle[i]:
                self.row[slot].n = w.old[i]
                self.see_tables(slot, 0, False)
        if w.executed or writes:
            self.leave_garbage(k, q)
        else:
            self.unqueue(at)
        if w.executed:
            self.write_garbage(q)
        return self.settle_queue()

    cdef void unqueue(self, int32_t at) noexcept nogil:
        cdef int32_t k
        free(self.queue[at].cells)
        self.num_queue -= 1
        for k in range(at, self.num_queue):
            self.queue[k] = self.queue[k + 1]

    cdef void write_garbage(self, const Queued* q) noexcept nogil:
        cdef int32_t i
        for i in range(q.num_cells):
            self.cell[<int32_t>(q.cells[i] >> 40)][<int32_t>q.cells[i]] = POISON + 1
        self.garbage += 1

    cdef int leave_garbage(self, int32_t k, Queued* q) except -1:
        """All cells that a plan was going to write."""
        cdef const Shown* shown
        cdef const Work* w = &self.work[k]
        cdef int32_t g, i, c, n, b
        cdef int64_t t, slot, size, room, tokens = 0
        for i in range(w.rows):
            tokens += w.new[i] - w.old[i]
        size = 0
        for g in range(self.num_groups):
            shown = &self.shown[k][g]
            size += shown.num_copies * <int64_t>self.group[g].size + tokens * self.group[g].columns + w.rows
            size += (shown.num_saves + shown.num_loads) * <int64_t>(1 + self.group[g].bundle)
        q.plan, q.num_cells, q.cells = GARBAGE, 0, <int64_t*>calloc(size + 1, sizeof(int64_t))
        for g in range(self.num_groups):
            shown, n, room = &self.shown[k][g], self.group[g].bundle, self.room[self.group[g].arena]
            if self.group[g].kind == STATE:
                for i in range(w.rows):
                    if shown.dst[i] >= 0 and w.new[i] > w.old[i]:
                        self.spoil(q, self.group[g].arena, shown.dst[i])
                for i in range(shown.num_loads):
                    self.spoil(q, self.group[g].arena, shown.loads[i * (1 + n)])
                for i in range(shown.num_saves):
                    for b in range(n):
                        self.spoil(q, 0, shown.saves[i * (1 + n) + 1 + b] * self.room[0])
                continue
            for i in range(shown.num_copies):
                for b in range(shown.copies[3 * i + 2]):
                    self.spoil(q, self.group[g].arena, shown.copies[3 * i + 1] * room + b)
            for t in range(tokens):
                for c in range(self.group[g].columns):
                    slot = shown.slots[c * shown.stride + t]
                    self.spoil(q, self.group[g].arena, slot // self.group[g].size * room + slot % self.group[g].size)
        return 0

    cdef inline void spoil(self, Queued* q, int32_t arena, int64_t cell) noexcept nogil:
        q.cells[q.num_cells] = <int64_t>arena << 40 | cell
        q.num_cells += 1

    cdef int32_t done_length(self, int32_t slot) noexcept nogil:
        """Tokens of a row that no pending plan has still to write."""
        cdef Row* r = &self.row[slot]
        cdef const Work* w
        cdef int32_t k, i, length = r.n
        for k in range(self.num_queue - 1, -1, -1):
            if self.queue[k].plan == GARBAGE:
                continue
            w = &self.work[self.queue[k].plan]
            if w.id == r.born:
                length = min(length, r.born_done)
            for i in range(w.rows):
                if w.handle[i] == r.handle:
                    length = min(length, w.old[i])
        return length

    cdef int64_t last_work(self, int32_t slot) noexcept nogil:
        """The newest pending plan that has a row; 0: none."""
        cdef const Work* w
        cdef int32_t k, i
        for k in range(self.num_queue - 1, -1, -1):
            if self.queue[k].plan != GARBAGE:
                w = &self.work[self.queue[k].plan]
                for i in range(w.rows):
                    if w.handle[i] == self.row[slot].handle:
                        return w.id
        return 0
