"""A step of decodes does the same Python work for 16 rows as for 256: counted calls, no clock."""

import sys

import numpy as np
import pytest

from kvpool import Pool, Request, Scheduler

STEPS = 20


def decoding(rows, **request):
    """Return a scheduler in which so many sequences decode."""
    scheduler = Scheduler(Pool(rows * 20 + 1, 16, max_seqs=rows), max_running=rows, max_step_tokens=4096)
    for _ in range(rows):
        scheduler.add(Request([1] * 16, max_tokens=200, **request))
    scheduler.update(scheduler.schedule(), np.full(rows, 5, np.int32))
    assert scheduler.stats().decoding == rows
    return scheduler


def calls(scheduler, rows):
    """Return how many calls, into Python and into C, `STEPS` steps make."""
    tokens, count = np.full(rows, 5, np.int32), 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    scheduler.update(scheduler.schedule(), tokens)
    sys.setprofile(note)
    try:
        for _ in range(STEPS):
            scheduler.update(scheduler.schedule(), tokens)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("request_options", [{}, {"eos": (2, 3), "stop": [(5, 4), (5, 5, 6)]}], ids=repr)
def test_decode_step_python_calls_do_not_depend_on_the_rows(request_options):
    few, many = (calls(decoding(rows, **request_options), rows) for rows in (16, 256))
    assert few == many
    assert many / STEPS < 150


def test_decode_step_keeps_no_memory():
    scheduler, tokens = decoding(64), np.full(64, 5, np.int32)
    for _ in range(20):
        scheduler.update(scheduler.schedule(), tokens)
    before = sys.getallocatedblocks()
    for _ in range(40):
        scheduler.update(scheduler.schedule(), tokens)
    assert sys.getallocatedblocks() - before < 40


def calls_with(waiting, tenants):
    """Return how many calls steps make that admit while so many requests of so many tenants wait."""
    scheduler = Scheduler(Pool(400, 16, max_seqs=16), max_running=8)
    for number in range(waiting):
        scheduler.add(Request([1] * 16, max_tokens=2, tenant=number % tenants, priority=number % 3))
    count = calls(scheduler, 8)
    assert scheduler.stats().waiting > waiting - 8 * STEPS
    return count


@pytest.mark.parametrize("tenants", [1, 10**6])
def test_step_that_admits_python_calls_do_not_depend_on_who_waits(tenants):
    assert calls_with(5000, tenants) < 1.3 * calls_with(300, tenants)
