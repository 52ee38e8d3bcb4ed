"""Which block holds what: the content keys of an engine with block tables of its own, one to one with their blocks.

The keys, and the dict and list that know them, are Python's; what is compiled is the loop over a call's keys.
"""

cdef object NO_KEY          # where a block has none
NO_KEY = object()


@cython.boundscheck(True)
cdef class Keys:
    """A key for some of the blocks.

    Parameters
    ----------
    num_blocks : int
    reserved : int, default 0
        Blocks below this id never get a key.

    Attributes
    ----------
    block_of : dict
        Key -> block.
    """

    cdef readonly dict block_of
    cdef list key_of            # [num_blocks], NO_KEY: none
    cdef Py_ssize_t reserved

    def __init__(self, num_blocks, reserved=0):
        self.reserved = reserved
        self.block_of = {}
        self.key_of = [NO_KEY] * num_blocks

    def __len__(self):
        return len(self.block_of)

    def key(self, Py_ssize_t block):
        """The key of a block, None: it has none."""
        key = self.key_of[block]
        return None if key is NO_KEY else key

    def find(self, keys):
        """Blocks of the longest prefix of `keys` that all have one."""
        cdef list found = []
        cdef PyObject* block
        cdef Py_ssize_t n = 0
        for key in keys:
            block = PyDict_GetItemWithError(self.block_of, key)
            if block == NULL:
                break
            if n == 0:
                found = [None] * len(keys)  # a list that grows moves a dozen times for a hundred blocks
            if n < len(found):
                found[n] = <object>block
            else:                           # more keys than there were
                found.append(<object>block)
            n += 1
        if n < len(found):
            del found[n:]
        return found

    def add(self, list blocks not None, list keys not None):
        """Give each block its key, unless another block has that; returns the blocks that stay without.

        An exception of a key, which cannot be hashed or compared, leaves everything as it was.
        """
        cdef list others = []
        cdef PyObject* owner
        cdef Py_ssize_t k, i
        try:
            for k in range(len(blocks)):
                i = block = blocks[k]
                if i < self.reserved:
                    continue
                owner = PyDict_SetDefault(self.block_of, keys[k], block)
                if owner == <PyObject*>block or <object>owner == block:
                    self.key_of[i] = keys[k]
                else:
                    others.append(block)
        except BaseException:
            self.undo(blocks)
            raise
        return others

    cdef int undo(self, list blocks) except -1:
        """O(keys)."""
        cdef Py_ssize_t i
        cdef set named = set(blocks)
        for key in [key for key, block in self.block_of.items() if block in named]:
            del self.block_of[key]
        for i in named:
            self.key_of[i] = NO_KEY
        return 0

    def new(self, list blocks not None, list keys not None):
        """Of these pairs those that `add` would make: unreserved blocks, and the first of every key that is new."""
        cdef dict fresh = {}
        for block, key in zip(blocks, keys):
            if block >= self.reserved and key not in self.block_of:
                fresh.setdefault(key, block)
        return list(fresh.values()), list(fresh)

    def drop(self, blocks):
        """Take the keys of these blocks away, as far as they have one; returns the keys."""
        cdef list dropped = []
        cdef Py_ssize_t i
        for block in blocks:
            i = block
            key = self.key_of[i]
            if key is not NO_KEY:
                self.key_of[i] = NO_KEY
                del self.block_of[key]
                dropped.append(key)
        return dropped

    def clear(self):
        """Take all keys away."""
        self.block_of.clear()
        self.key_of = [NO_KEY] * len(self.key_of)

    def check(self):
        """Blocks that have a key, ascending; AssertionError: keys and blocks are not one to one. O(blocks)."""
        cdef dict found = {}
        cdef list keyed = [block for block, key in enumerate(self.key_of) if key is not NO_KEY]
        for block in keyed:
            found[self.key_of[block]] = block
        if found != self.block_of or len(found) != len(keyed):
            raise AssertionError(f"{len(keyed)} blocks have a key, {len(self.block_of)} keys have a block")
        return keyed
