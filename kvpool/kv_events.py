"""Events of the prefix cache on the wire, as vLLM publishes its own: msgpack over ZMQ.

    publisher = EventPublisher("tcp://127.0.0.1:5557", replay="tcp://127.0.0.1:5558")
    publisher.publish(pool.prefix.events())     # after each step
    publisher.close()

A router or an indexer that reads vLLM's events reads these. A message has three frames: the topic, a sequence number
(8 bytes, big-endian), and a batch of `BlockStored`, `BlockRemoved` and `AllBlocksCleared`. A reader that missed a
number sends the first that it wants to `replay` and gets what is kept from there on, then the number -1.

Block hashes are the pool's keys, 16 bytes. Where the pool lost events, `AllBlocksCleared` comes first: a reader then
knows less than the pool holds, never more. Needs the extra ``events``.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)
KINDS = {"full": "full_attention", "window": "sliding_window", "chunk": "chunked_local_attention", "state": "mamba"}


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    """Blocks of one group that hits can use now, each the parent of the next."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    """Blocks that are gone."""

    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True):
    """Everything is gone."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """What one call of `publish` says."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


def on_the_wire(events: Iterable[tuple[Any, ...]], medium: str) -> list[msgspec.Struct]:
    """Events of a pool in vLLM's words; neighbours that belong together are one."""
    told: list[Any] = []
    for what, *about in events:
        last = told[-1] if told else None
        if what == "stored":
            key, parent, tokens, block_size, namespace, group, kind, window = about
            extra = (namespace.decode("utf-8", "backslashreplace"),) if namespace else None
            if isinstance(last, BlockStored) and last.block_hashes[-1] == parent and last.group_idx == group:
                last.block_hashes.append(key)
                last.token_ids += tokens
                if last.extra_keys is not None:
                    last.extra_keys.append(extra)
            else:
                keys: list[Any] | None = [extra] if extra else None
                spec = KINDS[kind]
                told.append(
                    BlockStored([key], parent, [*tokens], block_size, None, medium, None, keys, group, spec, window)
                )
        elif what == "removed":
            key, group = about
            if isinstance(last, BlockRemoved) and last.group_idx == group:
                last.block_hashes.append(key)
            else:
                told.append(BlockRemoved([key], medium, group))
        elif what == "lost" or about == [None]:  # a flush of one namespace has removed its blocks already
            told.append(AllBlocksCleared())
    return told


class EventPublisher:
    """Publishes events of a pool; any thread may call it.

    Parameters
    ----------
    endpoint : str
        Where subscribers connect, such as ``tcp://127.0.0.1:5557``.
    replay : str, optional
        Where they ask for what they missed.
    topic : str, default ""
    keep : int, default 10,000
        Batches for `replay`.
    medium : str, default "GPU"
        Where the blocks are, in vLLM's words.
    rank : int, optional
        The data-parallel rank of every batch.

    Attributes
    ----------
    endpoint, replay : str
        The addresses, where ``*`` as a port was given the ones that were free.

    Raises
    ------
    OSError
        An address is taken or cannot be used. Nothing is left open.
    """

    def __init__(
        self, endpoint: str, *, replay: str | None = None, topic: str = "", keep: int = 10_000, medium: str = "GPU",
        rank: int | None = None,
    ) -> None:  # fmt: skip
        self._topic, self._medium, self._rank = topic.encode(), medium, rank
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=keep)
        self._context, self._lock = zmq.Context(), threading.Lock()
        try:
            self._out = self._bound(zmq.PUB, endpoint)
            self._asked = self._bound(zmq.ROUTER, replay) if replay is not None else None
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            places = " or ".join(filter(None, (endpoint, replay)))
            raise OSError(f"[EventPublisher] {places} cannot be bound: {error.strerror}") from error
        self.endpoint = self._address(self._out)
        self.replay = self._address(self._asked) if self._asked is not None else None
        self._inbox = self._bound(zmq.PULL, "inproc://batches")
        self._post: zmq.Socket[bytes] | None = self._context.socket(zmq.PUSH)
        self._post.set_hwm(0)
        self._post.connect("inproc://batches")
        self._thread = threading.Thread(target=self._serve, name="kvpool-events", daemon=True)
        self._thread.start()

    def publish(self, events: Iterable[tuple[Any, ...]]) -> None:
        """Send what `pool.prefix.events()` returned. It never waits for a reader; without events it sends nothing.

        Raises
        ------
        ValueError
            The publisher is closed.
        """
        told = on_the_wire(events, self._medium)
        with self._lock:
            if self._post is None:
                raise ValueError("[publish] the publisher is closed")
            if told:
                self._post.send(msgspec.msgpack.encode(EventBatch(time.time(), told, self._rank)))

    def close(self) -> None:
        """Send what waits and free the addresses. A second call does nothing."""
        with self._lock:
            post, self._post = self._post, None
        if post is not None:
            post.send(b"")
            self._thread.join()
            self._context.destroy(linger=1000)

    def _bound(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(100_000 if kind == zmq.PUB else 0)
        socket.bind(endpoint)
        return socket

    @staticmethod
    def _address(socket: zmq.Socket[bytes]) -> str:
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _serve(self) -> None:
        """The thread that has the sockets: numbers and sends batches, and answers who missed some."""
        poller, number = zmq.Poller(), 0
        for socket in filter(None, (self._inbox, self._asked)):
            poller.register(socket, zmq.POLLIN)
        while True:
            for socket, _ in poller.poll():
                frames = socket.recv_multipart()
                if socket is self._inbox:
                    if not frames[0]:
                        return
                    batch = number.to_bytes(8, "big"), frames[0]
                    self._kept.append(batch)
                    self._out.send_multipart([self._topic, *batch])
                    number += 1
                elif len(frames) == 3 and len(frames[2]) == 8:  # who asks, nothing, the first number
                    answer = [batch for batch in self._kept if batch[0] >= frames[2]]
                    for kept in answer:
                        socket.send_multipart([frames[0], b"", self._topic, *kept])
                    socket.send_multipart([frames[0], b"", b"", END, b""])
