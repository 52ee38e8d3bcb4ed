# cython: boundscheck=True
"""Which block holds what: the content keys of an engine with block tables of its own, one to one with their blocks.

The keys are Python's, and so are the dict and the list that know them; what is compiled is the loop over a call's
keys. It knows nothing of a pool.
"""
from cpython.dict cimport PyDict_GetItemWithError, PyDict_SetDefault
from cpython.object cimport PyObject

_NO_KEY = object()


cdef class Keys:
    """A key for some of the blocks.

    Parameters
    ----------
    num_blocks : int

    Attributes
    ----------
    block_of : dict
        Key -> block.
    """

    cdef readonly dict block_of
    cdef list key_of            # [num_blocks], _NO_KEY: none

    def __init__(self, num_blocks):
        self.block_of = {}
        self.key_of = [_NO_KEY] * num_blocks

    def __len__(self):
        return len(self.block_of)

    def key(self, Py_ssize_t block):
        """The key of a block, None: it has none."""
        key = self.key_of[block]
        return None if key is _NO_KEY else key

    def find(self, keys):
        """Blocks of the longest prefix of `keys` that all have one."""
        cdef list found = []
        cdef PyObject* block
        for key in keys:
            block = PyDict_GetItemWithError(self.block_of, key)
            if block == NULL:
                break
            found.append(<object>block)
        return found

    def add(self, list blocks not None, list keys not None):
        """Give each block its key, unless another block has that; returns the blocks that stay without."""
        cdef list others = []
        cdef PyObject* owner
        cdef Py_ssize_t k, i
        for k in range(len(blocks)):
            block, key = blocks[k], keys[k]
            owner = PyDict_SetDefault(self.block_of, key, block)
            if owner == <PyObject*>block or <object>owner == block:
                i = block
                self.key_of[i] = key
            else:
                others.append(block)
        return others

    def drop(self, blocks):
        """Take the keys of these blocks away, as far as they have one; returns the keys."""
        cdef list dropped = []
        cdef Py_ssize_t i
        for block in blocks:
            i = block
            key = self.key_of[i]
            if key is not _NO_KEY:
                self.key_of[i] = _NO_KEY
                del self.block_of[key]
                dropped.append(key)
        return dropped

    def forget(self, blocks):
        """The same after an `add` that broke off, in which a key may be known by one side alone. O(keys)."""
        cdef Py_ssize_t i
        cdef set named = set(blocks)
        for key in [key for key, block in self.block_of.items() if block in named]:
            del self.block_of[key]
        for block in named:
            i = block
            self.key_of[i] = _NO_KEY

    def clear(self):
        """Take all keys away."""
        self.block_of.clear()
        self.key_of = [_NO_KEY] * len(self.key_of)

    def check(self):
        """Blocks that have a key, ascending; AssertionError: keys and blocks are not one to one. O(blocks)."""
        cdef dict found = {}
        cdef list keyed = [block for block, key in enumerate(self.key_of) if key is not _NO_KEY]
        for block in keyed:
            found[self.key_of[block]] = block
        if found != self.block_of or len(found) != len(keyed):
            raise AssertionError(f"{len(keyed)} blocks have a key, {len(self.block_of)} keys have a block")
        return keyed
