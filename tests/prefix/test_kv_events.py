"""Events of the prefix cache over ZMQ: order, numbers, replay, and addresses that cannot be had."""

import msgspec
import pytest

zmq = pytest.importorskip("zmq")

from kvpool.kv_events import END, EventPublisher, on_the_wire  # noqa: E402

KEYS = [bytes([k]) * 16 for k in range(60)]


@pytest.fixture
def wire(request):
    """A publisher that keeps 50 batches, or what the test says, and a subscriber that is connected."""
    keep = getattr(request, "param", 50)
    publisher = EventPublisher("tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*", topic="kv", keep=keep)
    context = zmq.Context()
    reader = context.socket(zmq.SUB)
    reader.setsockopt(zmq.RCVHWM, 0)
    reader.subscribe(b"kv")
    reader.connect(publisher.endpoint)
    yield publisher, reader, context
    publisher.close()
    context.destroy(linger=0)


def batches(reader, count=None, wait=10_000):
    """The messages that arrive, in order."""
    while count != 0 and reader.poll(wait):
        topic, number, payload = reader.recv_multipart()
        assert topic == b"kv"
        yield int.from_bytes(number, "big"), payload
        count = None if count is None else count - 1


def test_reader_gets_batches_in_order_and_replays_what_it_missed(wire):
    publisher, reader, context = wire
    while not reader.poll(50):
        publisher.publish([("cleared", None)])  # until the subscription has arrived
    first = next(batches(reader))[0]
    for key in KEYS:
        publisher.publish([("removed", key, 0)])
    got = []
    for number, payload in batches(reader):
        _, ((event,)) = msgspec.msgpack.decode(payload)[:2]
        if event["type"] == "BlockRemoved":
            got.append((number, event["block_hashes"][0]))
        if len(got) == 60:
            break
    assert [key for _, key in got] == KEYS
    assert [number for number, _ in got] == list(range(got[0][0], got[0][0] + 60)) and got[0][0] > first - 1

    asker = context.socket(zmq.DEALER)
    asker.connect(publisher.replay)
    asker.send_multipart([b"", got[-10][0].to_bytes(8, "big")])
    again = []
    while True:
        _, _, number, _ = asker.recv_multipart()
        if number == END:
            break
        again.append(int.from_bytes(number, "big"))
    assert again == [number for number, _ in got[-10:]]


@pytest.mark.parametrize("wire", [0], indirect=True)
def test_publisher_that_keeps_nothing_sends_all_the_same(wire):
    publisher, reader, _ = wire
    assert any(publisher.publish([("cleared", None)]) or reader.poll(50) for _ in range(100))


def test_address_in_use_is_refused_and_nothing_is_left_open(wire, tmp_path):
    publisher, _, _ = wire
    with pytest.raises(OSError, match=r"\[EventPublisher\] .* cannot be bound: Address already in use"):
        EventPublisher("tcp://127.0.0.1:*", replay=publisher.endpoint)
    with pytest.raises(OSError, match=r"\[EventPublisher\] .* cannot be bound: Address already in use"):
        EventPublisher(f"ipc://{tmp_path}/a", replay=f"ipc://{tmp_path}/a")
    EventPublisher(f"ipc://{tmp_path}/a").close()  # its file was left, and nobody listens on it


def test_publisher_that_is_closed_says_so(wire):
    publisher, _, _ = wire
    publisher.close()
    publisher.close()
    with pytest.raises(ValueError, match="closed"):
        publisher.publish([("cleared", None)])


def test_neighbours_are_one_event_and_what_was_lost_clears_all():
    stored = [("stored", KEYS[k], KEYS[k - 1] if k else None, [k] * 4, 4, b"", 0, "full", None) for k in range(3)]
    told = on_the_wire(
        [("lost", 7), *stored, ("removed", KEYS[0], 0), ("removed", KEYS[1], 0), ("cleared", b"x")], "GPU"
    )
    assert [event["type"] for event in told] == ["AllBlocksCleared", "BlockStored", "BlockRemoved"]
    assert told[1]["block_hashes"] == KEYS[:3] and told[1]["token_ids"] == [0] * 4 + [1] * 4 + [2] * 4
    assert told[1]["parent_block_hash"] is None and told[2]["block_hashes"] == KEYS[:2]
