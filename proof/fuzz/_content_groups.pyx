"""The backend of a pool with layer groups, as the fuzzer plays it: it knows no rule by which a pool works.

Every token has a stamp of its own, and so has every column of every group of it. A plan is executed as late as a
backend may, by its arrays as they are then: copies and reads of states, writes, then reads of what the queries of its
rows may read. A block that is handed out or becomes blank is poisoned at once: who still reads it is robbed.
"""
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from proof.fuzz._books cimport Books, Line, Pending
from proof.fuzz._books_groups cimport GONE, STATE_KIND, Layers, ceil_entries, first_read, row_of
from proof.fuzz._storage cimport found, line_stamp

cdef enum:
    POISON = 0x0BADC0DE


cdef inline uint64_t mark(uint64_t stamp, int32_t group, int32_t column) noexcept nogil:
    """What a block holds of a token in one column of one group."""
    return (stamp + <uint64_t>(group * 4096 + column + 1)) * 0x9E3779B97F4A7C15ULL


cdef int content_init(Content* c, const GroupBooks* gb) noexcept nogil:
    """Returns 0, or -1 without memory; `content_free` in either case."""
    cdef int32_t a, k
    cdef int64_t i
    memset(c, 0, sizeof(Content))
    for k in range(gb.num_groups):
        c.room = max(c.room, gb.layers[k].size)
    for a in range(gb.num_arenas):
        c.cell[a] = <uint64_t*>calloc(gb.arena[a].num_blocks * c.room, sizeof(uint64_t))
        if c.cell[a] == NULL:
            return -1
        for i in range(gb.arena[a].num_blocks * c.room):
            c.cell[a][i] = POISON
    return 0


cdef void content_free(Content* c) noexcept nogil:
    cdef int32_t a
    for a in range(MOST_ARENAS):
        free(c.cell[a])
    memset(c, 0, sizeof(Content))


cdef void content_poison(Content* c, GroupBooks* gb) noexcept nogil:
    """Blocks that the last call took or gave back hold nothing that anybody may read."""
    cdef Books* b
    cdef int32_t a
    cdef int64_t k, i
    for a in range(gb.num_arenas):
        b = gb.arena[a]
        for k in range(b.num_spoilt):
            for i in range(b.spoilt[k] * c.room, (b.spoilt[k] + 1) * c.room):
                c.cell[a][i] = POISON
        b.num_spoilt = 0


# ---- a plan is executed ------------------------------------------------------------------------------------

cdef int run_states(Content* c, const GroupBooks* gb, int32_t g, const Pending* p, const Shown* shown) noexcept nogil:
    """Every row reads its state before anybody writes one: rows run in any order."""
    cdef uint64_t* cell = c.cell[gb.layers[g].arena]
    cdef int64_t capacity = gb.arena[0].capacity, slots = gb.arena[gb.layers[g].arena].num_blocks, at
    cdef int32_t row, other, src, dst
    for row in range(p.rows):
        src, dst = shown.src[row], shown.dst[row]
        if p.length[row] == p.before[row]:
            continue
        at = p.before[row] - 1
        if at < 0 and src != -1:
            return found(&c.finding, b"group %lld: row %lld without tokens reads the state in slot %lld", g, row, src,
                         0)
        if at >= 0 and not 0 <= src < slots:
            return found(&c.finding, b"group %lld: row %lld with %lld tokens reads no state", g, row, at + 1, 0)
        if at >= 0 and cell[src * c.room] != mark(p.expect[row * capacity + at], g, 0):
            return found(&c.finding, b"group %lld: row %lld does not read its own state in slot %lld", g, row, src, 0)
        if not 0 <= dst < slots:
            return found(&c.finding, b"group %lld: row %lld writes its state to %lld", g, row, dst, 0)
        for other in range(p.rows):
            if other != row and p.length[other] > p.before[other] and (
                    dst == shown.src[other] or dst == shown.dst[other]):
                return found(&c.finding, b"group %lld: row %lld writes state %lld, which row %lld has", g, row, dst,
                             other)
    for row in range(p.rows):
        if p.length[row] > p.before[row]:
            cell[shown.dst[row] * c.room] = mark(p.expect[row * capacity + p.length[row] - 1], g, 0)
    return 0


cdef int run_writes(Content* c, const GroupBooks* gb, int32_t g, const Pending* p, const Shown* shown) noexcept nogil:
    """Copies, then new tokens."""
    cdef const Layers* layers = &gb.layers[g]
    cdef const Books* b = gb.arena[layers.arena]
    cdef uint64_t* cell = c.cell[layers.arena]
    cdef const int32_t* copy = shown.copies
    cdef int64_t t = 0, position, slot, end = b.num_blocks * layers.size
    cdef int32_t i, column
    for i in range(shown.num_copies):
        if not (b.reserved <= copy[0] < b.num_blocks and b.reserved <= copy[1] < b.num_blocks
                and 0 < copy[2] <= layers.size):
            return found(&c.finding, b"group %lld: a copy of block %lld to %lld of %lld tokens", g, copy[0], copy[1],
                         copy[2])
        memcpy(cell + copy[1] * c.room, cell + copy[0] * c.room, copy[2] * sizeof(uint64_t))
        copy += 3
    for i in range(p.rows):
        for position in range(p.before[i], p.length[i]):
            for column in range(layers.columns):
                slot = shown.slots[column * shown.stride + t]
                if not b.reserved * layers.size <= slot < end:
                    return found(&c.finding, b"group %lld: token %lld is written to slot %lld of column %lld", g, t,
                                 slot, column)
                cell[slot // layers.size * c.room + slot % layers.size] = mark(
                    p.expect[i * gb.arena[0].capacity + position], g, column)
            t += 1
    return 0


cdef int read_tokens(Content* c, const GroupBooks* gb, int32_t g, const int32_t* row, const uint64_t* stamp,
                     int64_t position, int64_t end, const char* what, int64_t who) noexcept nogil:
    """What queries read from a position on, in every column, against what was written there."""
    cdef const Layers* layers = &gb.layers[g]
    cdef const uint64_t* cell = c.cell[layers.arena]
    cdef int64_t blocks = gb.arena[layers.arena].num_blocks
    cdef int32_t column, block
    for position in range(position, end):
        for column in range(layers.columns):
            block = row[position // layers.size * layers.columns + column]
            if not 0 <= block < blocks or (
                    cell[block * c.room + position % layers.size] != mark(stamp[position], g, column)):
                return found(&c.finding, what, g, who, position, block)
    return 0


cdef int run_reads(Content* c, const GroupBooks* gb, int32_t g, const Pending* p, const Shown* shown) noexcept nogil:
    """The queries of a plan."""
    cdef const Layers* layers = &gb.layers[g]
    cdef const uint64_t* stamp
    cdef const int32_t* row
    cdef const char* what = b"group %lld: row %lld of a plan does not read its token at %lld in block %lld"
    cdef int64_t low
    cdef int32_t i
    for i in range(p.rows):
        if p.length[i] == p.before[i]:
            continue
        stamp, row = p.expect + i * gb.arena[0].capacity, shown.tables + <int64_t>i * shown.width
        low = first_read(layers, max(p.before[i] - c.more, <int64_t>0))
        if (read_tokens(c, gb, g, row, stamp, 0, min(low, layers.keep), what, i)
                or read_tokens(c, gb, g, row, stamp, low, p.length[i], what, i)):
            return -1
    return 0


cdef int content_execute(Content* c, const GroupBooks* gb, int32_t k, const Shown* shown) noexcept nogil:
    """The backend runs plan k, group by group. 0, or -1 with a finding."""
    cdef const Pending* p = &gb.arena[0].plan[k]
    cdef int32_t g
    for g in range(gb.num_groups):
        if gb.layers[g].kind == STATE_KIND:
            if run_states(c, gb, g, p, &shown[g]):
                return -1
        elif run_writes(c, gb, g, p, &shown[g]):
            return -1
    for g in range(gb.num_groups):
        if gb.layers[g].kind != STATE_KIND and run_reads(c, gb, g, p, &shown[g]):
            return -1
    return 0


# ---- what every sequence can still read --------------------------------------------------------------------

cdef int content_check(Content* c, const GroupBooks* gb, const Storage* s) noexcept nogil:
    """No plan is pending: every sequence has all that queries after the shortest legal truncation read."""
    cdef const Books* b = gb.arena[0]
    cdef const Layers* layers
    cdef const Line* line
    cdef const uint64_t* stamp
    cdef const char* what = b"group %lld: sequence %lld does not read its token at %lld in block %lld"
    cdef int64_t low
    cdef int32_t i, g, slot
    for i in range(b.num_live):
        slot = b.live[i]
        line, stamp = &b.line[slot], line_stamp(s, b, slot)
        for g in range(gb.num_groups if line.length else 0):
            layers = &gb.layers[g]
            if layers.kind == STATE_KIND:
                if c.cell[layers.arena][row_of(layers, slot)[0] * c.room] != mark(stamp[line.length - 1], g, 0):
                    return found(&c.finding, b"group %lld: sequence %lld has not its own state in slot %lld", g,
                                 line.handle, row_of(layers, slot)[0], 0)
                continue
            low = first_read(layers, max(gb.passed[slot] - gb.lookahead - c.more, <int64_t>0))
            if (read_tokens(c, gb, g, row_of(layers, slot), stamp, 0, min(min(low, layers.keep), line.length), what,
                            line.handle)
                    or read_tokens(c, gb, g, row_of(layers, slot), stamp, low, line.length, what, line.handle)):
                return -1
    return 0
