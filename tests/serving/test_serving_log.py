"""The log of a server: what it says of ten seconds, and which lines go to stderr."""

import asyncio
import json
import logging

import pytest
from mlx_models import on_cpu

from kvpool.adapters.mlx_lm import Engine, tiny
from kvpool.serving import telemetry


@pytest.mark.parametrize("form", telemetry.FORMS)
def test_log_on_stderr_is_text_or_json_or_failures_alone(capsys, form):
    package = logging.getLogger("kvpool.serving.app")
    told = {"id": "req_1", "tenant": 'a "b"', "first": None, "total": 0.5, "ignored": ["x", "y"], "error": []}
    with telemetry.to_stderr(form):
        package.info("one", extra={"told": told})
        package.warning("two")
    package.warning("three")
    lines = [line for line in capsys.readouterr().err.splitlines() if "three" not in line]
    if form == "json":
        one, two = map(json.loads, lines)
        assert {"message": "one", "level": "info", "id": "req_1", "total": 0.5}.items() <= one.items()
        assert (one["tenant"], one["ignored"], two["level"]) == ('a "b"', ["x", "y"], "warning") and "first" not in one
    else:
        due = ['one id=req_1 tenant="a \\"b\\"" total=0.5 ignored=x,y', "two"]
        assert [line.split(" ", 2)[2] for line in lines] == (due if form == "text" else due[1:])


def test_report_says_what_was_computed_and_nothing_of_an_idle_server(monkeypatch, caplog):
    with on_cpu():
        model, tokenizer = tiny.make()
        engine = Engine(model, 40, tokenizer=tokenizer, block_size=4, prefix_cache=True)
    times = iter(range(0, 1000, 10))
    monkeypatch.setattr(telemetry, "SECONDS", 0)
    caplog.set_level(logging.INFO, "kvpool.serving.telemetry")

    async def watched():
        reporting = asyncio.create_task(telemetry.report(engine, lambda: next(times)))
        for begins in (False, True, True):
            for _ in range(3):
                await asyncio.sleep(0)
            if begins:
                engine.submit(list(range(1, 21)), max_tokens=11)
                while engine.num_unfinished:
                    engine.step()
        for _ in range(3):
            await asyncio.sleep(0)
        reporting.cancel()

    with on_cpu(), engine:
        asyncio.run(watched())
    assert caplog.messages == [
        "0 running, 0 waiting; 1.1 tokens a second, 2.0 of prompts; 0 % of blocks in use",
        "0 running, 0 waiting; 1.1 tokens a second, 0.4 of prompts, 80 % of prompts cached; 0 % of blocks in use",
    ]
