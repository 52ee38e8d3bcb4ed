"""Events of the prefix cache on the wire, as vLLM publishes its own: msgpack over ZMQ.

    publisher = EventPublisher("tcp://127.0.0.1:5557", replay="tcp://127.0.0.1:5558")
    publisher.publish(pool.prefix.events())     # after each step
    publisher.close()

A router or an indexer that reads vLLM's events reads these. A message has three frames: the topic, a sequence number
(8 bytes, big-endian), and a batch ``[time, events, data-parallel rank]`` of `BlockStored`, `BlockRemoved` and
`AllBlocksCleared`. A reader that missed a number sends the first that it wants to `replay` and gets what is kept from
there on, then the number -1.

Block hashes are the pool's keys, 16 bytes. Where the pool lost events, `AllBlocksCleared` comes first: a reader then
knows less than the pool holds, never more. Needs the extra ``events``.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)
KINDS = {"full": "full_attention", "window": "sliding_window", "chunk": "chunked_local_attention", "state": "mamba"}


def on_the_wire(events: Iterable[tuple[Any, ...]], medium: str) -> list[dict[str, Any]]:
    """Events of a pool in vLLM's words; neighbours that belong together are one."""
    told: list[dict[str, Any]] = []
    for what, *about in events:
        last: dict[str, Any] = told[-1] if told else {}
        before = last.get("type"), last.get("group_idx")
        if what == "stored":
            key, parent, tokens, block_size, namespace, group, kind, window = about
            extra = [(namespace.decode("utf-8", "backslashreplace"),)] if namespace else []
            if before == ("BlockStored", group) and last["block_hashes"][-1] == parent:
                last["block_hashes"].append(key)
                last["token_ids"] += tokens
                last.get("extra_keys", []).extend(extra)
                continue
            event = {"block_hashes": [key], "parent_block_hash": parent, "token_ids": [*tokens], "medium": medium}
            event |= {"block_size": block_size, "group_idx": group, "lora_id": None, "lora_name": None}
            event |= {"kv_cache_spec_kind": KINDS[kind], "kv_cache_spec_sliding_window": window}
            told.append({"type": "BlockStored"} | event | ({"extra_keys": extra} if extra else {}))
        elif what == "removed":
            key, group = about
            if before == ("BlockRemoved", group):
                last["block_hashes"].append(key)
            else:
                told.append({"type": "BlockRemoved", "block_hashes": [key], "medium": medium, "group_idx": group})
        elif what == "lost" or about == [None]:  # a flush of one namespace has removed its blocks already
            told.append({"type": "AllBlocksCleared"})
    return told


class EventPublisher:
    """Publishes events of a pool; any thread may call it.

    Parameters
    ----------
    endpoint : str
        Where subscribers connect, such as ``tcp://127.0.0.1:5557``. The attributes `endpoint` and `replay` have the
        port that was free for ``*``.
    replay : str, optional
        Where they ask for what they missed.
    topic : str, default ""
    keep : int, default 10,000
        Batches for `replay`.
    medium : str, default "GPU"
        Where the blocks are, in vLLM's words.
    rank : int, optional
        The data-parallel rank of every batch.

    Raises
    ------
    OSError
        An address is taken or cannot be used. Nothing is left open.
    """

    def __init__(
        self, endpoint: str, *, replay: str | None = None, topic: str = "", keep: int = 10_000, medium: str = "GPU",
        rank: int | None = None,
    ) -> None:  # fmt: skip
        self._topic, self._medium, self._rank, self._number = topic.encode(), medium, rank, 0
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=keep)
        self._context, self._lock = zmq.Context(), threading.Lock()
        try:
            self._out, self.endpoint = self._bound(zmq.PUB, endpoint)
            self.replay: str | None = None
            if replay is not None:
                asked, self.replay = self._bound(zmq.ROUTER, replay)
                threading.Thread(target=self._answer, args=[asked], name="kvpool-events", daemon=True).start()
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            places = " or ".join(filter(None, (endpoint, replay)))
            raise OSError(f"[EventPublisher] {places} cannot be bound: {error.strerror}") from error

    def publish(self, events: Iterable[tuple[Any, ...]]) -> None:
        """Send what `pool.prefix.events()` returned, if it is anything. It never waits for a reader.

        ValueError if the publisher is closed.
        """
        told = on_the_wire(events, self._medium)
        with self._lock:
            if self._out.closed:
                raise ValueError("[publish] the publisher is closed")
            if told:
                payload = msgspec.msgpack.encode((time.time(), told, self._rank))
                batch = self._number.to_bytes(8, "big"), payload
                self._kept.append(batch)
                self._out.send_multipart([self._topic, *batch])
                self._number += 1

    def close(self) -> None:
        """Send what waits, for a second at most, and free the addresses. A second call does nothing."""
        with self._lock:
            self._out.close()
        self._context.term()  # this ends the wait of the thread, which closes its socket

    def _bound(self, kind: int, endpoint: str) -> tuple[zmq.Socket[bytes], str]:
        own = self._context.socket(kind)
        own.set_hwm(100_000 if kind == zmq.PUB else 0)
        own.linger = 1000  # milliseconds
        if endpoint.startswith("ipc://"):  # ZMQ deletes the file that is there, also one that somebody listens on
            with socket.socket(socket.AF_UNIX) as asker, suppress(OSError):  # of a long path, which ZMQ refuses
                asker.setblocking(False)
                if asker.connect_ex(endpoint.removeprefix("ipc://")) in (0, errno.EAGAIN):
                    raise zmq.ZMQError(errno.EADDRINUSE)
        own.bind(endpoint)
        return own, own.getsockopt_string(zmq.LAST_ENDPOINT)

    def _answer(self, socket: zmq.Socket[bytes]) -> None:
        """The thread that sends again what readers missed: who asks, nothing, the first number."""
        try:
            while True:
                who, *asked = socket.recv_multipart()
                if len(asked) == 2 and len(asked[1]) == 8:
                    with self._lock:
                        missed = [batch for batch in self._kept if batch[0] >= asked[1]]
                    for batch in missed:
                        socket.send_multipart([who, b"", self._topic, *batch])
                    socket.send_multipart([who, b"", b"", END, b""])
        except zmq.ContextTerminated:
            socket.close()
