"""What a prefix cache tells about its nodes: events, made of the index's journal in the call after."""
from libc.stdint cimport int32_t, uint32_t

from kvpool._prefix cimport Index
from kvpool._sequence_calls cimport SequencePool
from kvpool._types cimport NO_BLOCK

import hashlib


cdef class EventPool(SequencePool):
    """Events of the prefix cache. See `kvpool.Pool` and docs/prefix.md."""

    def drain_events(self):
        """Events since the last call, oldest first: tuples as docs/prefix.md lists them."""
        self.enter("drain_events")
        try:
            if self.events is None:
                return []
            found = list(self.events)
            if self.lost_events:
                found.insert(0, ("lost", self.lost_events))
            self.events.clear()
            self.lost_events = 0
            return found
        finally:
            self.busy = False

    cdef void add_event(self, tuple event):
        """The oldest event makes room; without memory this one is lost instead."""
        cdef bint full = True
        try:
            full = len(self.events) == self.events.maxlen
            self.events.append(event)
        except MemoryError:
            full = True
        self.lost_events += full

    cdef void publish(self):
        """Turn the journal of the calls before into events. Without memory for them they count as lost."""
        cdef int32_t k = 0, n = self.index.journal_size
        self.lost_events += self.index.journal_lost
        self.index.journal_size = self.index.journal_lost = 0
        for k in range(n):
            try:
                self.publish_entry(self.index.journal + 3 * k)
            except Exception:
                self.lost_events += 1

    cdef int publish_entry(self, const int32_t* entry) except -1:
        """One node that came or went, with its content key."""
        cdef Index* ix = &self.index
        cdef int32_t id = entry[0]
        cdef uint32_t uid = <uint32_t>entry[1], parent = <uint32_t>entry[2]
        if id == NO_BLOCK:
            key = self.keys.pop(uid, None)
            if key is None:                     # that it came was lost
                self.lost_events += 1
            else:
                self.add_event(("removed", key))
            return 0
        namespace = self.names.get(ix.root[id], b"")
        before = self.keys.get(parent)
        if before is None and parent != ix.root[id]:
            self.lost_events += 1               # its parent was lost, so nobody knows what to add this one to
            return 0
        content = (<const char*>(ix.tokens + id * ix.block_size))[:ix.block_size * 4]
        key = hashlib.sha256((before or hashlib.sha256(namespace).digest()[:16]) + content).digest()[:16]
        tokens = [ix.tokens[id * ix.block_size + i] for i in range(ix.block_size)]
        event = ("stored", key, before, tokens, ix.block_size, namespace)
        self.keys[uid] = key
        self.add_event(event)
        return 0
