"""What a request may be, and which ones `add` takes."""

import numpy as np
import pytest
from schedules import Machine

from kvpool import KVPoolError, Pool, Request, Scheduler
from kvpool.errors import RequestRejected, UnknownRequest

TYPE_ERRORS = [
    *(
        {"prompt": prompt}
        for prompt in ("text", b"bytes", 7, None, [1.0], [True], [None], [[1]], np.array([1.5]), ["1"])
    ),
    *({"max_tokens": value} for value in (None, 1.5, "3", True)),
    *({"eos": value} for value in ("x", 1.5, [1.5], [True], None)),
    *({"stop": value} for value in ("x", 3, [3], [[1.5]], None)),
    *({"n": value} for value in (None, 1.0, True)),
    *({"beam_width": value} for value in (None, 2.0, False)),
    *({"length_penalty": value} for value in (None, "1", True, 1j)),
    *({"priority": value} for value in (None, 1.5, True)),
    *({"namespace": value} for value in (None, "text", 1)),
    *({"deadline": value} for value in ("1", True)),
    *({name: []} for name in ("id", "tenant")),
    {"cut": 1.0},
    *({"keep": keep} for keep in (300, (1, 300), "1h")),
]
VALUE_ERRORS = [
    *({"prompt": prompt} for prompt in ([], [-1], [2**31], np.zeros((2, 2), int), np.array([-1]), [10**30])),
    *({"max_tokens": value} for value in (0, -1, 2**31)),
    *({"eos": value} for value in (-1, [-1], [2**31])),
    *({"stop": value} for value in ([[]], [[1], []], [[-1]])),
    *({"n": value} for value in (0, -1)),
    {"beam_width": -1},
    {"beam_width": 2, "n": 3},
    *({"length_penalty": value} for value in (float("nan"), float("inf"), -float("inf"), 33)),
    *({"cut": cut} for cut in (-1, 2)),
    *({"deadline": value} for value in (float("nan"), float("inf"), 10**400)),
]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [*((wrong, TypeError) for wrong in TYPE_ERRORS), *((wrong, ValueError) for wrong in VALUE_ERRORS)],
    ids=repr,
)
def test_request_of_a_wrong_type_or_value_is_refused(wrong, error):
    said = next(iter(wrong)) if {"tenant", "deadline"} & set(wrong) else ""
    with pytest.raises(error, match=rf"^\[Request\] {said}"):
        Request(**{"prompt": [1], **wrong})


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint8, np.int16])
def test_request_prompt_is_kept_as_a_read_only_copy(dtype):
    given = np.arange(1, 9, dtype=dtype)[::2]
    request = Request(given, eos=3, stop=[[1, 2], np.array([4])])
    given[:] = 0
    assert request.prompt.dtype == np.int32 and request.prompt.tolist() == [1, 3, 5, 7]
    assert (request.eos, request.stop) == ((3,), ((1, 2), (4,)))
    with pytest.raises(ValueError):
        request.prompt[0] = 1
    with pytest.raises(AttributeError):
        request.max_tokens = 3


def test_add_numbers_requests_around_ids_in_use():
    scheduler = Scheduler(Pool(64, 4))
    assert scheduler.add(Request([1], id=1)) == 1
    assert [scheduler.add(Request([1])) for _ in range(3)] == [0, 2, 3]
    with pytest.raises(ValueError, match=r"^\[add\] the id is in use \(2\)"):
        scheduler.add(Request([1], id=2))
    with pytest.raises(TypeError, match=r"^\[add\] "):
        scheduler.add([1, 2])
    assert scheduler.stats().waiting == 4


def test_add_beam_fits_as_a_whole_or_is_rejected():
    # 2 blocks of prompt shared, and for each hypothesis 1 more block and 1 for a copy: 2 + 3 * 2 = 8
    scheduler = Scheduler(Pool(9, 4), max_running=3)
    scheduler.add(Request([1] * 8, max_tokens=5, beam_width=3))
    for request in (Request([1] * 8, max_tokens=6, beam_width=3), Request([1], max_tokens=1, beam_width=4)):
        with pytest.raises(RequestRejected) as caught:
            scheduler.add(request)
        assert caught.value.reason == "too_large"


@pytest.mark.parametrize("lanes", [1, 100])
def test_add_number_of_samples_is_bounded_by_the_lanes(lanes):
    most = max(64, lanes)
    scheduler = Scheduler(Pool(400, 4), max_running=lanes)
    before = scheduler.stats()
    for n in (most + 1, 2**31 - 1):
        with pytest.raises(RequestRejected, match=rf"^\[add\] n is {n}, .* {most} ") as caught:
            scheduler.add(Request([1], max_tokens=2, n=n))
        assert caught.value.reason == "too_large"
    assert scheduler.stats() == before._replace(rejected=2) and scheduler.schedule() is None
    scheduler.add(Request([1], max_tokens=1, n=most))
    assert len(Machine(scheduler, scheduler._core.pool).run()) == most


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ({"eos": range(1025)}, "eos has 1025 .* 1024"),
        ({"stop": [[token] for token in range(1025)]}, "stop has 1025 .* 1024"),
        ({"stop": [[3], [1] * 257]}, "257 tokens.* 256"),
    ],
)
def test_add_more_ends_than_a_step_looks_for_are_rejected(ends, words):
    scheduler = Scheduler(Pool(64, 4))
    with pytest.raises(RequestRejected, match=rf"^\[add\] .*{words}") as caught:
        scheduler.add(Request([1], **ends))
    assert caught.value.reason == "too_large" and scheduler.schedule() is None


def test_longest_stop_sequence_ends_a_request():
    stop = [*range(10), *[7] * 246]
    pool = Pool(200, 4)
    scheduler = Scheduler(pool)
    scheduler.add(Request([1], max_tokens=300, stop=[stop, [7] * 256], eos=range(100, 1124)))
    for token in [3, *stop]:
        outputs = scheduler.update(scheduler.schedule(), np.int32([token]))
    assert (outputs[0].tokens.tolist(), outputs[0].finish_reason) == ([3, *stop], "stop")


def test_cancel_unknown_or_finished_request_says_which():
    pool = Pool(64, 4)
    scheduler = Scheduler(pool)
    with pytest.raises(UnknownRequest, match=r"^\[cancel\] request 'x' is not there: it was never added") as caught:
        scheduler.cancel("x")
    assert isinstance(caught.value, KeyError) and isinstance(caught.value, KVPoolError)
    scheduler.add(Request([1], id="x", max_tokens=1))
    Machine(scheduler, pool).run()
    with pytest.raises(UnknownRequest, match=r"^\[cancel\] request 'x' has finished"):
        scheduler.cancel("x")
    with pytest.raises(UnknownRequest, match=r"^\[tokens_of\] "):
        scheduler.tokens_of("x")


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        *(({"max_running": value}, TypeError, "") for value in (1.0, None, True)),
        *(({"max_step_tokens": value}, TypeError, "") for value in ("8", None)),
        *(({"prefill_chunk": value}, TypeError, "") for value in (2.5, None)),
        *(({"mixed": value}, TypeError, "") for value in (1, None, "no")),
        *(({"watermark": value}, TypeError, "") for value in (1.5, True)),
        *(({name: 3}, TypeError, "") for name in ("tier", "clock", "pad_to")),
        *(({"max_running": value}, ValueError, "") for value in (0, -1, 2**20 + 1)),
        *(({name: 0}, ValueError, "") for name in ("max_step_tokens", "prefill_chunk", "max_model_len", "plans")),
        *(({name: -1}, ValueError, "") for name in ("watermark", "max_waiting")),
        *(({"preempt": value}, ValueError, "") for value in ("first", None, 3)),
        ({"plans": None}, TypeError, ""),
        ({"nonsense": 1}, TypeError, ""),
        ({"pad_to": (1, 1)}, ValueError, ""),
        ({"formats": ("nonsense",)}, ValueError, ""),
        ({"weights": {"a": 0}}, ValueError, r"weights\['a'\] must be 0.001 .. 1000 \(0\)"),
        ({"weights": {"a": float("nan")}}, ValueError, "nan"),
        ({"weights": {"a": "1"}}, TypeError, "must be a number"),
        ({"weights": {"a": True}}, TypeError, "must be a number, not bool"),
        ({"weights": ["a"]}, TypeError, "weights must be a mapping"),
        ({"ageing": 0}, ValueError, "ageing must be 1"),
        ({"overtake": -1}, ValueError, "overtake must be 0"),
        ({"overtake": None}, TypeError, "overtake must be an int"),
    ],
    ids=repr,
)
def test_scheduler_option_of_a_wrong_type_or_value_is_refused(wrong, error, said):
    with pytest.raises(error, match=said or None):
        Scheduler(Pool(64, 4), **wrong)


def test_scheduler_without_a_pool_is_refused():
    with pytest.raises(TypeError, match="pool must be"):
        Scheduler("pool")
