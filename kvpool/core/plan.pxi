"""`Plan`: what one step hands to a backend, its arrays, and what it takes to undo the step.

The *parts* of a plan are a `PlanGroup` for each layer group, and one before them with what all groups share. A *whole*
array has room for any step of the plan. Attributes show a *view* of it: what the last step filled.

    Field.data, and whatever else C writes to == the data of the array in PlanGroup.arrays that has its name
    rows <= shown_rows <= max_rows, tokens <= shown_tokens <= max_tokens
    Pool.plans names the plan while its step is pending

Why it is so:

- C keeps addresses, so memory must stay where it is. NumPy moves that of an array on request, whoever holds a buffer.
  So an array of the plan owns nothing, its bytes are a `_Memory` that the plan keeps beside it; and of a caller's, all
  arrays that may own the bytes are anchored, see `_arguments.anchored`.
- No Python code runs under the lock of the pool: to judge an array, or to let go of one, may run some. So `attach`
  judges what is there without the lock, and remembers how often arrays were exchanged until then. Under the lock
  `exchange_arrays` moves addresses alone, if that number is still the same; else all is judged again. What C wrote to
  before lives until `show_arrays`, behind the lock, which puts the new arrays in its place.
- The dicts of a part are exchanged or read as wholes in a critical section, as other threads read attributes.
- Only a row whose table the arrays show is not dirty. So a bind forgets what rows hold, and `bind()` does no more.
"""

LENGTH_FIELDS = ("seq_lens", "positions")
ROW_FORMATS = ("block_tables", "csr", "page_batch_info")
DTYPES = {4: np.int32, 8: np.int64}

cdef class _Memory:
    """Memory of an array of a plan, zeros at first. An array over it owns nothing, so it cannot be resized."""

    def __cinit__(self, Py_ssize_t size, bint writable):
        self.data = <char*>xcalloc(max(size, 1), 1)
        if self.data == NULL:
            raise MemoryError(f"[Plan] no memory for an array of {size} bytes")
        self.size = size
        self.writable = writable

    def __dealloc__(self):
        xfree(self.data)

    def __getbuffer__(self, Py_buffer* view, int flags):
        PyBuffer_FillInfo(view, self, self.data, self.size, not self.writable, flags)


cdef tuple new_array(object shape, object dtype, bint writable):
    """An array of zeros, and the memory it shows: NumPy lets an array turn to other memory, so a plan keeps both."""
    cdef object size = np.dtype(dtype).itemsize
    for length in shape:
        size *= length
    memory = _Memory(size, writable)
    return np.ndarray(shape, dtype, memory), memory


cdef list OF_A_PLAN = []            # only a plan makes its groups


cdef class PlanGroup:
    """Arrays of a plan for one layer group, an element of `Plan.groups`; see ``docs/core.md``."""

    # One more of them, which nobody else sees, has the arrays that are common to all groups.

    def __cinit__(self, maker=None):
        if maker is not OF_A_PLAN:
            raise TypeError("[PlanGroup] a Plan makes its groups, see plan.groups")

    @cython.callspec("KV_COLD")
    cdef int init(self, const LayerGroup* group, int64_t rows, int64_t tokens, int64_t table_tokens,
                  int32_t bundle) except -1:
        """The arrays that are always there; `define` makes those that were asked for."""
        cdef StepPart* data = &self.data
        cdef int64_t width = (table_tokens + group.block_size - 1) // group.block_size
        self.arrays, self.views = {}, {}
        self.kind, self.columns = group.kind, group.columns
        self.num_slots = group.blocks.num_blocks * group.block_size
        self.tokens = tokens
        if part_init(data, <int32_t>rows) != OK or wire_init(&data.wire, <int32_t>rows) != OK:
            raise MemoryError(f"[Plan] no memory for {rows} rows")
        if group.kind == STATE_LAYERS:
            data.state_src = <int32_t*>self.add("state_src", (rows,), True)
            data.state_dst = <int32_t*>self.add("state_dst", (rows,), True)
            data.loads = <int32_t*>self.add("state_loads", (rows, 1 + bundle), False)
            data.saves = <int32_t*>self.add("state_saves", (rows, 1 + bundle), False)
            return 0
        if width * group.columns > INT32_MAX:
            raise ValueError(f"[Plan] a row has {width * group.columns} block ids, the limit is {INT32_MAX}")
        data.width = <int32_t>width
        data.wire.table_width = <int32_t>(width * group.columns)
        data.copies = <int32_t*>self.add("copies", (rows * group.columns, 3), False)
        data.copies_room = rows * group.columns
        data.wire.dirty = <int32_t*>self.add("dirty_rows", (rows,), False)
        starts = self.add("kv_starts", (rows,), True)
        if group.kind != FULL_LAYERS:
            data.kv_starts = <int32_t*>starts
        return 0

    def __dealloc__(self):
        part_free(&self.data)

    def __reduce__(self):
        raise TypeError("[PlanGroup] arrays of a plan cannot be pickled or copied")

    cdef int init_common(self, int64_t rows, int64_t tokens) except -1:
        self.arrays, self.views = {}, {}
        self.kind, self.columns = COMMON_ARRAYS, 1
        self.tokens = tokens
        self.data.max_rows = <int32_t>rows
        return 0

    cdef void* add(self, str name, object shape, bint writable, object dtype=np.int32) except NULL:
        array, memory = new_array(shape, dtype, writable)
        self.arrays[name] = array, memory
        return array_data(array)

    cdef bint has(self, str name) except -1:
        if name in COMMON or self.kind == COMMON_ARRAYS:
            return name in COMMON and self.kind == COMMON_ARRAYS
        return self.kind != STATE_LAYERS or name == "seq_lens"

    cdef Field* field_of(self, str name) except NULL:
        return &self.data.wire.field[<int>FIELDS.index(name)]

    cdef tuple whole_shape(self, str name):
        cdef object rows = self.data.max_rows
        if name == "block_tables":
            return (rows, self.data.width) if self.columns == 1 else (rows, self.data.width, self.columns)
        if name == "indices":
            return (rows * <object>self.data.wire.table_width,)
        if name == "slot_mapping":
            return (self.columns * <object>self.tokens,)
        if name == "positions":
            return (self.tokens,)
        return (rows + 1 if name in ("indptr", "cu_q_lens") else rows,)

    cdef int check_width(self, str name, int width) except -1:
        if width == 8 or self.kind == STATE_LAYERS:
            return 0
        if name == "slot_mapping" and self.num_slots > INT32_MAX:
            raise ValueError(f"[Plan] slot_mapping needs int64: the blocks have {self.num_slots} slots, int32 holds "
                             f"{INT32_MAX}")
        if name == "indptr" and self.data.max_rows * <int64_t>self.data.width > INT32_MAX:
            raise ValueError(f"[Plan] indptr needs int64: it can reach {self.data.max_rows * <int64_t>self.data.width},"
                             f" int32 holds {INT32_MAX}")
        return 0

    cdef int room_for_copies(self, State* pool, int64_t copies) except -1:
        """A step copies one entry per row at most; `unshare` may copy them all."""
        cdef int32_t* data
        cdef int64_t seen
        cdef dict held, shown
        while copies > self.data.copies_room:
            with critical_section(self):
                seen, held, shown = self.data.copies_room, self.arrays, self.views
            held = {**held, "copies": new_array((copies, 3), np.int32, False)}
            data = <int32_t*>array_data(held["copies"][0])
            shown = {name: view for name, view in shown.copy().items() if name != "copies"}
            with critical_section(self):
                pool_enter(pool, "unshare")
                if self.data.copies_room == seen:
                    memcpy(data, self.data.copies, 12 * <size_t>self.data.num_copies)
                    self.data.copies = data
                    self.data.copies_room = copies
                    held, self.arrays = self.arrays, held   # what was there is let go of outside of the lock
                    shown, self.views = self.views, shown
                pool_leave(pool)
        return 0

    cdef dict arrays_now(self):
        with critical_section(self):            # another thread may exchange them
            return self.arrays

    cdef object view(self, str name, int64_t length, bint flat=False):
        """What the last step filled; the same object as long as its length stays. `flat`: without columns."""
        cdef dict arrays, views
        cdef object key = (name, flat)
        with critical_section(self):            # another thread may exchange them
            arrays, views = self.arrays, self.views
        cached = views.get(key)
        if cached is not None and <int64_t>cached[0] == length:
            return cached[1]
        if name not in arrays:
            raise AttributeError(f"[Plan] this group of the plan has no {shown_name(name)}, it has "
                                 f"{', '.join([shown_name(each) for each in arrays])}")
        shown = arrays[name][0]
        if flat and self.columns == 1:
            shown = shown[:length]
        elif name == "slot_mapping":
            shown = shown[:self.columns * length].reshape(self.columns, length)
        elif name == "block_tables":
            shown = shown[:length].reshape(length, self.data.width, self.columns)
        elif name == "indices":
            shown = shown[:self.columns * length].reshape(length, self.columns)
        else:
            shown = shown[:length]
        views[key] = (length, shown)
        return shown

    @property
    def block_tables(self):
        """``[S, width, columns]``: the table of each row; holes where entries were let go, and pad beyond it."""
        return self.view("block_tables", self.data.shown_rows)

    @property
    def slot_mapping(self):
        """``[columns, T]``: slot (id * block_size + offset) of each new token in each column."""
        return self.view("slot_mapping", self.data.shown_tokens)

    @property
    def kv_starts(self):
        """int32 ``[S]``: first position from which on the row has no hole, a multiple of the block size."""
        return self.view("kv_starts", self.data.shown_rows)

    @property
    def kv_lens(self):
        """``[S]``: tokens of the row after the step, with those that were let go, without evicted ones."""
        return self.view("seq_lens", self.data.shown_rows)

    @property
    def indptr(self):
        """``[S + 1]``: where each row starts in `indices`."""
        return self.view("indptr", self.data.shown_rows + 1)

    @property
    def indices(self):
        """``[nnz, columns]``: filled entries of all rows without holes, one row after another."""
        return self.view("indices", self.data.wire.nnz)

    @property
    def last_page_len(self):
        """``[S]``: tokens in the last filled entry, 1 .. block_size; 0 for an empty row."""
        return self.view("last_page_len", self.data.shown_rows)

    @property
    def copies(self):
        """int32 ``[K, 3]``: (src_block, dst_block, num_tokens), to be made before any write of this plan."""
        return self.view("copies", self.data.num_copies)

    @property
    def dirty_rows(self):
        """int32 ``[D]``, ascending: rows of `block_tables` that this step changed."""
        return self.view("dirty_rows", self.data.wire.num_dirty)

    @property
    def state_src(self):
        """int32 ``[S]``: state slot that the row reads, -1: none."""
        return self.view("state_src", self.data.shown_rows)

    @property
    def state_loads(self):
        """int32 ``[K, 1 + blocks]``: a slot, and the blocks of arena 0 to copy to it before the first layer."""
        return self.view("state_loads", self.data.num_loads)

    @property
    def state_saves(self):
        """int32 ``[K, 1 + blocks]``: a slot, and the blocks of arena 0 that it is copied to after the last layer."""
        return self.view("state_saves", self.data.num_saves)

    @property
    def state_dst(self):
        """int32 ``[S]``: state slot that the row writes as a whole, -1: none."""
        return self.view("state_dst", self.data.shown_rows)


cdef str shown_name(str name):
    """A group calls its seq_lens kv_lens."""
    return "kv_lens" if name == "seq_lens" else name


cdef class Plan:
    """One step in flight: the arrays a backend reads, and what it takes to undo the step.

    Parameters
    ----------
    pool : Pool
    max_rows : int
        Rows the arrays hold, S.
    max_tokens : int, optional
        New tokens they hold, T; default `max_rows`, enough for decoding.
    formats : iterable of str
        What to fill; a format nobody asks for costs nothing. Arrays, with their whole shapes:
        ``block_tables [S, W]``, ``seq_lens [S]``, ``slot_mapping [T]``, ``positions [T]``, ``cu_q_lens [S + 1]``,
        ``csr`` (``indptr [S + 1]``, ``indices [S * W]``, ``last_page_len [S]``), ``slot_ids [S]``,
        ``page_batch_info``. Those of ``positions``, ``cu_q_lens`` and ``slot_ids`` are common to all layer groups; each
        group has the others for itself, see `groups`.
    table_width : int, optional
        W, blocks; default the pool's `max_blocks_per_seq`.
    dtype : str or dict, default "int32"
        "int32" or "int64", for all arrays or per array.
    pad : dict, optional
        Pad value per array.
    out : dict, optional
        Arrays to write into instead of own ones; see `bind`.
    backend : kvpool.protocol.KVBackend or GroupStorage, optional
        Fill what this backend reads, its ``required_formats``, beside `formats`.

    Raises
    ------
    ValueError, TypeError
        An unknown format, a bad size, or int32 slots in a pool that needs int64. A backend whose blocks have another
        size than those of the pool, or another number.

    Notes
    -----
    Attributes show the part that the last step filled (or its `pad_to` shape). Contents hold until the next step on
    this plan; an attribute is the same array object as long as its shape stays.
    """

    __signature__ = signature(_arguments.Plan)

    def __cinit__(self, *args, **options):
        making(self)
        (pool, max_rows, max_tokens, formats, table_width, dtype, pad, out,
         backend) = _arguments.Plan(*args, **options)
        if not isinstance(pool, Pool):
            raise TypeError(f"[Plan] pool must be a kvpool.Pool, not {type(pool).__name__}")
        self.pool = pool
        pool_enter(&self.pool.state, "Plan")
        pool_leave(&self.pool.state)
        cdef int64_t rows = to_int(max_rows, "Plan", "max_rows", 1, MAX_SEQS)
        self.max_tokens_ = rows if max_tokens is None else to_int(max_tokens, "Plan", "max_tokens", 0, INT32_MAX)
        self.table_width = self.pool.state.seqs.max_blocks
        if table_width is not None:
            self.table_width = <int32_t>to_int(table_width, "Plan", "table_width", 1, INT32_MAX)
        if step_init(&self.step, <int32_t>rows) != OK:
            raise MemoryError(f"[Plan] no memory for {rows} rows")
        self.common = PlanGroup(OF_A_PLAN)
        self.common.init_common(rows, self.max_tokens_)
        self.field = self.common.data.wire.field
        # An undo relies on them, so nobody else writes them.
        self.served_ = <uint8_t*>self.common.add("served", (rows,), False, np.uint8)
        self.step.handle = <int64_t*>self.common.add("handles", (rows,), False, np.int64)
        self.step.plan = <void*>self
        self.step.part = self.part
        if backend is not None:
            formats = _arguments.formats_with(backend, self.pool, formats)
        self.make_groups()
        self.declare(formats, dtype, {} if pad is None else pad, {} if out is None else out)
        made(self)

    def __dealloc__(self):
        step_free(&self.step)

    def __reduce__(self):
        raise TypeError("[Plan] a plan cannot be pickled or copied")

    def __repr__(self):
        state = f"pending as step {self.number_of_step('repr')}" if flag(&self.step.pending) else "not pending"
        return f"<kvpool.Plan of {self.step.max_rows} rows and {self.max_tokens_} tokens, {state}>"

    @cython.callspec("KV_COLD")
    cdef int declare(self, object formats, object dtype, object pad, object out) except -1:
        """Decide which arrays there are, with which dtype and pad, and make or bind them."""
        formats = _arguments.known_formats(formats)
        self.names = _arguments.named_arrays(formats, dtype, pad, out)
        for part in self.group_plans:
            (<PlanGroup>part).data.wire.tracks = ((<PlanGroup>part).kind != STATE_LAYERS
                                                  and any(f in ROW_FORMATS for f in formats))
        low = 0 if self.pool.options.reserved_blocks else -1
        pads = {"block_tables": -1 if "page_batch_info" in formats else low, "slot_mapping": -1, "slot_ids": -1}
        for name in self.names:
            self.define(name, _arguments.itemsize(name, dtype),
                        to_int(pad.get(name, pads.get(name, 0)), "Plan", f"pad of {name}", -INT32_MAX - 1, INT32_MAX))
        return self.attach(out, "Plan")

    cdef int define(self, str name, int width, int64_t pad) except -1:
        cdef Field* field
        cdef PlanGroup part
        if width == 4 and name in LENGTH_FIELDS:
            self.seq_limit = min(self.seq_limit, INT32_MAX)
        for k in self.owners(name):
            part = <PlanGroup>self.parts[k]
            part.check_width(name, width)
            field = part.field_of(name)
            field.width = width
            field.pad = pad
            field.data = part.add(name, part.whole_shape(name), True, DTYPES[width])
            if pad != 0:
                part.arrays[name][0].fill(pad)
        return 0

    @cython.callspec("KV_COLD")
    cdef int make_groups(self) except -1:
        cdef LayerGroup[MAX_GROUPS] group
        cdef PlanGroup made
        cdef int32_t k, n
        pool_enter(&self.pool.state, "Plan")            # a copy: another thread may shut the pool down
        n = self.pool.state.groups.num_groups
        for k in range(n):
            group[k] = self.pool.state.groups.group[k]
        self.seq_limit = INT64_MAX
        parts = []
        for k in range(n):
            if group[k].kind != FULL_LAYERS and group[k].kind != STATE_LAYERS:
                self.seq_limit = INT32_MAX              # kv_starts
        pool_leave(&self.pool.state)
        for k in range(n):
            made = PlanGroup(OF_A_PLAN)
            made.init(&group[k], self.step.max_rows, self.max_tokens_,
                      self.table_width * <int64_t>self.pool.options.block_size, self.pool.options.groups[k].blocks)
            parts.append(made)
        self.group_plans = tuple(parts)
        self.parts = (self.common, *parts)
        self.table_blocks = INT64_MAX
        for k in range(n):                              # not before they are kept: a later one may have been refused
            self.part[k] = &(<PlanGroup>self.group_plans[k]).data
            if group[k].kind != STATE_LAYERS:
                self.table_blocks = min(self.table_blocks, <int64_t>self.part[k].width << group[k].scale)
        return 0

    cdef list owners(self, str name):
        """The parts that have an array of such a name: 0 is what is common, 1 .. the layer groups."""
        return [k for k in range(len(self.parts)) if (<PlanGroup>self.parts[k]).has(name)]

    @cython.callspec("KV_COLD")
    cdef int attach(self, dict arrays, str call) except -1:
        """Bind the caller's arrays, given by name, all or none; what rows hold is forgotten."""
        cdef void* data[(MAX_GROUPS + 1) * NUM_FIELDS]
        cdef Verdict v
        cdef int64_t seen
        cdef int status = RETRY
        cdef dict held
        cdef PlanGroup part
        owners = {name: self.owners(name) for name in arrays}
        bound = {(k, name): _arguments.anchored(array, name, call)
                 for (k, name), array in _arguments.by_group(arrays, owners, len(self.group_plans), call).items()}
        while status == RETRY:
            with critical_section(self):
                seen = self.changes
            held = {(k, name): array for k in range(len(self.parts))
                    for name, array in (<PlanGroup>self.parts[k]).arrays_now().copy().items()}
            held.update(bound)
            memset(data, 0, sizeof(data))
            for (k, name), (array, _) in bound.items():
                part = <PlanGroup>self.parts[k]
                _arguments.check_array(array, (k, name), part.field_of(name).width, part.whole_shape(name), held, call)
                data[<int>k * NUM_FIELDS + <int>FIELDS.index(name)] = array_data(array)
            with critical_section(self):
                pool_enter(&self.pool.state, call)
                status = self.exchange_arrays(data, seen, &v)
                pool_leave(&self.pool.state)
                if status == OK and bound:
                    self.show_arrays(bound)
        if status != OK:
            refuse(call, &v)
        return 0

    cdef int show_arrays(self, dict bound) except -1:
        """What attributes show from now on."""
        cdef PlanGroup part
        for k in range(len(self.parts)):
            part = <PlanGroup>self.parts[k]
            fresh = {name: array for (owner, name), array in bound.items() if owner == k}
            with critical_section(part):        # `copies` may be another array than when the call began
                part.arrays, part.views = {**part.arrays, **fresh}, {}
        return 0

    cdef int exchange_arrays(self, void** data, int64_t seen, Verdict* v) noexcept nogil:
        """Write to the arrays at `data` from now on, NUM_FIELDS for what is common and for each group. RETRY: another
        thread has bound arrays since `seen`."""
        cdef int k, j
        cdef Field* field
        if self.step.pending:
            return refused(v, PLAN_PENDING, -1, self.step.id, 0, 0, 0)
        if self.changes != seen:
            return RETRY
        self.changes = self.changes + 1
        for j in range(self.pool.state.groups.num_groups + 1):
            field = &self.part[j - 1].wire.field[0] if j else self.field
            for k in range(NUM_FIELDS):
                if data[j * NUM_FIELDS + k] != NULL:
                    field[k].data = data[j * NUM_FIELDS + k]
            if j:
                wire_forget(&self.part[j - 1].wire, self.step.max_rows, data[j * NUM_FIELDS + BLOCK_TABLES] != NULL)
        return OK

    def bind(self, **arrays):
        """Write into the caller's arrays from the next step on.

        Parameters
        ----------
        **arrays : ndarray, or a sequence of them
            By name: its whole shape (see `Plan`), the declared dtype, C-contiguous, writable, overlapping no
            other array of the plan. In a pool of several layer groups, of a name that each group has: one array for
            each, None where the plan keeps what it has.

        Raises
        ------
        PlanStateError
            The plan is pending. State unchanged.
        TypeError, ValueError
            A wrong dtype; any other mismatch. State unchanged.

        Notes
        -----
        Every row is dirty in the next step. So ``bind()`` without arrays is for a consumer that lost what it had.
        As long as an array is bound, NumPy refuses to resize it, and arrays that it is a view of.
        """
        self.refuse_pending("bind")
        for name in arrays:
            if name not in self.names:
                raise ValueError(f"[bind] no such array ({name!r}), there are {', '.join(self.names)}")
        self.attach(arrays, "bind")

    cdef int get_pad(self, object pad_to, str call, int64_t num_rows, int64_t* rows, int64_t* tokens) except -1:
        try:
            pad_rows, pad_tokens = pad_to
        except (TypeError, ValueError):
            raise TypeError(f"[{call}] pad_to must be (rows, tokens), not {show(pad_to)}") from None
        rows[0] = to_int(pad_rows, call, "pad_to[0]", num_rows, self.step.max_rows)
        tokens[0] = to_int(pad_tokens, call, "pad_to[1]", 0, self.max_tokens_)
        return 0

    # -- what a step cannot be

    cdef int refuse_pending(self, str call) except -1:
        if flag(&self.step.pending):
            raise PlanStateError(f"[{call}] the plan is pending (step {self.number_of_step(call)}); "
                                 f"call done or rollback first")
        return 0

    cdef int64_t number_of_step(self, str call) except -1:
        """For messages: another thread may be at a step of this plan."""
        cdef int64_t number
        pool_enter_any(&self.pool.state, call)
        number = self.step.id
        pool_leave(&self.pool.state)
        return number

    cdef int refuse_rows(self, int64_t rows, str call) except -1:
        if rows > self.step.max_rows:
            raise CapacityExceeded(f"[{call}] {rows} rows, the plan holds {self.step.max_rows}")
        return 0

    cdef int refuse(self, const Verdict* v, str call, int64_t pad_tokens) except -1:
        """Raise what a step was refused for; `pad_tokens` -1: no padding was asked for."""
        if v.reason == TOO_MANY_TOKENS and pad_tokens >= 0 and v.value <= self.max_tokens_:
            raise ValueError(f"[{call}] pad_to has room for {pad_tokens} tokens, the batch has {v.value}")
        return refuse(call, v)

    # -- what the last step filled

    cdef object view(self, str name, int64_t length):
        """An array that is common, or of the only layer group, without columns if it has one."""
        cdef PlanGroup part = self.common
        if name not in ("served", "handles") and name not in COMMON:
            if len(self.group_plans) > 1:
                raise ValueError(f"[Plan] {name} differs between layer groups, see plan.groups")
            part = <PlanGroup>self.group_plans[0]
        try:
            return part.view(name, length, True)
        except AttributeError:
            raise AttributeError(f"[Plan] {name} was not asked for, this plan fills {', '.join(self.names)}") from None

    @property
    def groups(self):
        """A `PlanGroup` for each layer group of the pool, with the arrays that differ between them."""
        return self.group_plans

    @property
    def num_tokens(self):
        """New tokens that the last step served."""
        return self.tokens

    @property
    def limits(self):
        """What the arrays hold, and what no step may pass: a `kvpool.stats.PlanLimits`."""
        return PlanLimits(self.step.max_rows, self.max_tokens_, self.table_width)

    @property
    def is_pending(self):
        """Whether the plan waits for `done` or `rollback`."""
        return flag(&self.step.pending)

    @property
    def step_id(self):
        """Number of the plan's last step in its pool, 1, 2, ...; 0 before the first."""
        return self.step.id

    @property
    def handles(self):
        """int64 ``[S]``: the batch, without padding."""
        return self.view("handles", self.rows)

    @property
    def served(self):
        """uint8 ``[S]``: 1 where the row got its tokens, 0 where blocks were missing (`partial`)."""
        return self.view("served", self.rows)

    @property
    def copies(self):
        """int32 ``[K, 3]``: (src_block, dst_block, num_tokens), to be made before any write of this plan."""
        return self.view("copies", self.part[0].num_copies)

    @property
    def dirty_rows(self):
        """int32 ``[D]``, ascending: rows of `block_tables` that this step changed."""
        return self.view("dirty_rows", self.part[0].wire.num_dirty)

    @property
    def block_tables(self):
        """``[S, W]``: block ids of each sequence in order, padded; ``[S, W, columns]`` if there are several."""
        return self.view("block_tables", self.shown_rows)

    @property
    def seq_lens(self):
        """``[S]``: tokens of each row after the step that have a slot."""
        return self.view("seq_lens", self.shown_rows)

    @property
    def slot_mapping(self):
        """``[T]``: slot (block * block_size + offset) of each new token; ``[columns, T]`` if there are several."""
        return self.view("slot_mapping", self.shown_tokens)

    @property
    def positions(self):
        """``[T]``: position of each new token in its sequence."""
        return self.view("positions", self.shown_tokens)

    @property
    def cu_q_lens(self):
        """``[S + 1]``: prefix sums of the new tokens per row."""
        return self.view("cu_q_lens", self.shown_rows + 1)

    @property
    def indptr(self):
        """``[S + 1]``: where each row starts in `indices`."""
        return self.view("indptr", self.shown_rows + 1)

    @property
    def indices(self):
        """``[nnz]``: filled blocks of all rows, one after another."""
        return self.view("indices", self.part[0].wire.nnz)

    @property
    def last_page_len(self):
        """``[S]``: tokens in the last filled block, 1 .. block_size; 0 for an empty sequence."""
        return self.view("last_page_len", self.shown_rows)

    @property
    def slot_ids(self):
        """``[S]``: the sequence's slot in the pool."""
        return self.view("slot_ids", self.shown_rows)
