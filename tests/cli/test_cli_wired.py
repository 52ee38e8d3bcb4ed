"""--wired: which limit MLX gets, when, and what it is afterwards."""

import argparse
import math

import pytest

from kvpool.cli import demo, main, serve, wired
from kvpool.cli.console import CommandError
from kvpool.governor import WAITING, Decision

mx = pytest.importorskip("mlx.core")
unit_nbytes = pytest.importorskip("kvpool.serving.memory").unit_nbytes
GIB = 2**30


@pytest.fixture
def mac(monkeypatch):
    """A function that makes this a Mac with so many GiB; returns the limits that MLX is given."""

    def make(total, most=None, active=0):
        limits = [5]  # before the command
        device = {"memory_size": total * GIB, "max_recommended_working_set_size": (most or total * 3 // 4) * GIB}
        monkeypatch.setattr(mx.metal, "is_available", lambda: True)
        monkeypatch.setattr(mx, "device_info", lambda: device)
        monkeypatch.setattr(mx, "get_active_memory", lambda: active * GIB)
        monkeypatch.setattr(mx, "set_wired_limit", lambda limit: (limits[-1], limits.append(limit))[0])
        return limits

    return make


@pytest.mark.parametrize(
    ("given", "active", "expected"),
    [
        ("auto", 20, [5, 96 * GIB, 21 * GIB, 5]),
        ("auto", 100, [5, 96 * GIB, 96 * GIB, 5]),
        ("40GiB", 20, [5, 40 * GIB, 5]),
        ("400GiB", 20, [5, 96 * GIB, 5]),
        ("off", 20, [5]),
        ("0", 20, [5]),
    ],
)
def test_limit_is_set_before_loading_fitted_after_it_and_restored(mac, given, active, expected):
    limits = mac(128, active=active)
    with pytest.raises(ZeroDivisionError), wired.wired(given):
        assert limits[1:] == expected[1:2]
        wired.fit_wired(given)
        raise ZeroDivisionError
    assert limits == expected


@pytest.mark.parametrize(("total", "most", "expected"), [(16, 12, 0.65 * 16), (16, 8, 8), (24, 18, 18)])
def test_small_macs_keep_a_third_of_their_memory(mac, total, most, expected):
    mac(total, most)
    assert wired.most_wired_nbytes() == int(expected * GIB)


def test_nothing_is_wired_without_metal_and_nonsense_is_refused():
    with wired.wired("auto"):
        assert wired.fit_wired("auto") == wired.limit_of("auto") == 0
    parser = argparse.ArgumentParser()
    wired.add_wired_argument(parser)
    assert parser.parse_args([]).wired == "auto"
    with pytest.raises(CommandError, match="--wired much"):
        wired.limit_of("much")


def test_demo_wires_what_its_parts_load(mac, monkeypatch):
    limits = mac(128)
    monkeypatch.setattr(demo, "PARTS", [lambda args: iter([limits.append("shown")][:0])])
    assert main(["demo", "--wired", "40GiB"]) == 0 and limits == [5, 40 * GIB, "shown", 5]
    assert main(["demo", "--wired", "much"]) == 2 and len(limits) == 4


def make_engine(*arguments, num_blocks=None, bounds=None, memory=()):
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args = parser.parse_args(["--model", "tiny", *arguments])
    options = {"num_blocks": num_blocks, "block_size": 16, "max_running": 1}
    return serve.make_engine(args, options, argparse.Namespace(chat_template=None, defaults={}), bounds, memory)


def counted(engine):
    (found,) = [metric for metric in engine.metrics() if metric.name == "kvpool_wired_limit_bytes"]
    ((_, value),) = found.samples
    return value


def test_serve_counts_the_limit_in_its_metrics(monkeypatch):
    monkeypatch.setattr(serve, "fit_wired", lambda given: {"auto": 7}[given])
    assert counted(make_engine(num_blocks=9)) == 7


def test_serve_sets_the_limit_again_when_its_cache_has_another_size(mac, monkeypatch):
    memory, sizes = [], [3000, 500, 500]
    engine = make_engine("--memory", "64MiB", bounds=serve.Bounds(None, True, math.inf, 0), memory=memory)
    (one,) = memory
    unit, active = unit_nbytes(engine), mx.get_active_memory
    limits = mac(128)
    monkeypatch.setattr(mx, "get_active_memory", active)
    monkeypatch.setattr(one.governor, "decide", lambda *_: Decision(sizes.pop(0) * unit, WAITING, (), True))
    for expected in (3000, 500, 500):
        one.look(engine)
        assert engine.kv.pool.num_blocks == expected
        assert counted(engine) == limits[-1]
    first, larger, smaller = limits
    assert first == 5 and abs(larger - smaller - 2500 * unit) < 2**16 and larger > GIB + 3000 * unit


def test_generate_wires_its_model(mac, monkeypatch, capsys):
    limits = mac(64, active=1)
    monkeypatch.setattr(mx.metal, "is_available", lambda: len(limits) < 2)  # MLX itself computes on the CPU
    monkeypatch.setattr(wired, "most_wired_nbytes", lambda: 48 * GIB)
    assert main(["generate", "--model", "tiny", "--prompt", "a", "--max-tokens", "2"]) == 0
    assert limits == [5, 48 * GIB, 2 * GIB, 5]
