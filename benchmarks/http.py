"""Serving over HTTP: `kvpool serve` beside mlx-lm's server, as processes, under an open loop.

The same streamed chats arrive as a Poisson process, whether a server keeps up or not, and share system prompts. Each
server is a fresh process in each run, and all take turns. The clients are a process of their own (`http_clients`),
whose CPU time is counted apart. Times are by the clock and by the CPU time of the server's process, because others may
use the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import string
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import h11
import numpy as np

import kvpool
from benchmarks.command import judged, main
from benchmarks.gate import Gate, short, table
from benchmarks.measure import cpu_model
from benchmarks.serving import lengths
from kvpool.cli.console import CommandError

SENT = {
    **{"requests": "how many", "rate": "Poisson arrivals per second", "systems": "different system prompts"},
    **{
        "system_tokens": "tokens of each of them",
        "user": "lengths of the questions",
        "output": "lengths of the answers",
    },
    "seed": "of arrivals, lengths and texts",
}
LETTERS = np.array(list(string.ascii_letters + string.digits + " "))


@dataclass(frozen=True)
class Chat:
    """A streamed chat: when its client sends it, what it says, and how many tokens its answer has."""

    at: float
    system: str
    user: str
    max_tokens: int
    fields: tuple[tuple[str, Any], ...] = ()  # more of the body

    def as_json(self) -> dict[str, Any]:
        """Return it as `clients` reads it."""
        messages = [{"role": role, "content": getattr(self, role)} for role in ("system", "user")]
        body = {"messages": messages, "max_tokens": self.max_tokens, "temperature": 0.0, "stream": True}
        return {"at": self.at, "body": body | dict(self.fields)}


@dataclass(frozen=True)
class Shape:
    """What is sent: see `SENT`."""

    requests: int = 64
    rate: float = 16.0
    systems: int = 8
    system_tokens: int = 1024
    user: str = "lognormal:24:0.7:96"
    output: str = "lognormal:32:0.7:128"
    seed: int = 1

    def chats(self) -> list[Chat]:
        """Return the chats in order of arrival."""
        for_arrivals, for_texts, for_users, for_outputs = np.random.default_rng(self.seed).spawn(4)

        def text(length: int) -> str:
            return "".join(for_texts.choice(LETTERS, length))

        systems = [text(self.system_tokens) for _ in range(self.systems)]
        columns = (
            np.cumsum(for_arrivals.exponential(1 / self.rate, self.requests)).tolist(),
            for_texts.integers(0, self.systems, self.requests).tolist(),
            lengths(for_users, self.user, self.requests).tolist(),
            lengths(for_outputs, self.output, self.requests).tolist(),
        )
        return [Chat(at, systems[which], text(user), most) for at, which, user, most in zip(*columns, strict=True)]


# ------------------------------------------------------------------------------------------------------------ what came


PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class Answer:
    """What one client got; times in seconds."""

    due: float  # when its request was to be sent
    due_cpu: float  # the CPU time of the server when it was sent
    text: str
    times: list[float] = field(repr=False)  # when each character came
    cpu_times: list[float] = field(repr=False)
    failure: str | None  # what is wrong with it


def read(asked: dict[str, Any], got: dict[str, Any]) -> Answer:
    """Read an answer of `clients` to one request."""
    text, times, cpu_times, failure, ended = "", [], [], got["error"], False
    try:
        for wall, cpu, event in _events(got["pieces"]):
            if event == "[DONE]":
                ended = True
                continue
            told = json.loads(event)
            if "error" in told:
                failure = "an error in the stream"
            for choice in told.get("choices", ()):
                piece = choice["delta"].get("content") or ""
                text += piece
                times += [wall] * len(piece)
                cpu_times += [cpu] * len(piece)
    except (h11.ProtocolError, ValueError, KeyError) as error:
        failure = failure or f"{error}"
    if failure is None and not ended:
        failure = "the stream has no end"
    most = asked["body"]["max_tokens"]
    if failure is None and len(text) != most:
        failure = f"{len(text)} tokens of {most}"
    return Answer(asked["at"], got["sent_cpu"], text, times, cpu_times, failure)


def _events(pieces: Iterable[tuple[float, float, str]]) -> Iterator[tuple[float, float, str]]:
    """Yield the data of each server-sent event with the times of its last byte. Raise what is wrong with the answer."""
    line, rest = h11.Connection(h11.CLIENT), b""
    line.send(h11.Request(method="POST", target="/", headers=[("Host", "x"), ("Content-Length", "0")]))
    line.send(h11.EndOfMessage())
    for wall, cpu, piece in pieces:
        line.receive_data(piece.encode("latin-1"))
        while not isinstance(event := line.next_event(), h11.PAUSED | h11.NEED_DATA | h11.ConnectionClosed):
            if isinstance(event, h11.Response) and event.status_code != 200:
                raise ValueError(f"status {event.status_code}")
            if isinstance(event, h11.Data):
                *events, rest = (rest + bytes(event.data)).split(b"\n\n")
                for one in events:
                    if one.startswith(b"data: "):
                        yield wall, cpu, one[6:].decode()
            if isinstance(event, h11.EndOfMessage):
                return


@dataclass(frozen=True)
class Result:
    """A run of one server."""

    answers: list[Answer] = field(repr=False)
    wall: float  # seconds until the last answer ended
    cpu: float  # CPU seconds of the server in them
    clients_cpu: float  # of the clients, which are another process
    nbytes: int = 0  # what the resident memory of the server has grown by since it was ready, at its peak

    @property
    def failures(self) -> list[str]:
        """What is wrong with answers."""
        return [answer.failure for answer in self.answers if answer.failure is not None]

    @property
    def num_tokens(self) -> int:
        """Tokens of the answers that are right."""
        return sum(len(answer.text) for answer in self.answers if answer.failure is None)

    def as_json(self) -> dict[str, Any]:
        """Return rates, latencies in milliseconds, bytes and failures. Wrong answers count in failures alone."""
        right = [answer for answer in self.answers if answer.failure is None]
        found: dict[str, Any] = {
            **{"requests": len(self.answers), "failures": self.failures, "tokens": self.num_tokens},
            **{"wall_seconds": self.wall, "cpu_seconds": self.cpu, "clients_cpu_seconds": self.clients_cpu},
            "tokens_per_sec": self.num_tokens / self.wall if self.wall > 0 else None,
            "tokens_per_cpu_sec": self.num_tokens / self.cpu if self.cpu > 0 else None,
            "grown_nbytes": self.nbytes,
        }
        series: dict[str, Any] = {
            "ttft": [answer.times[0] - answer.due for answer in right],
            "ttft_cpu": [answer.cpu_times[0] - answer.due_cpu for answer in right],
            "itl": np.concatenate([np.zeros(0), *(np.diff(answer.times) for answer in right)]),
            "itl_cpu": np.concatenate([np.zeros(0), *(np.diff(answer.cpu_times) for answer in right)]),
        }
        for name, values in series.items():
            no_value = [None] * len(PERCENTILES)
            ms = np.percentile(1e3 * np.array(values), PERCENTILES).tolist() if len(values) else no_value
            found |= {f"{name}_ms_p{p}": value for p, value in zip(PERCENTILES, ms, strict=True)}
        return found


def result(asked: dict[str, Any], got: dict[str, Any], nbytes: int = 0) -> Result:
    """Return the result of a run of `clients`."""
    answers = [read(*pair) for pair in zip(asked["requests"], got["answers"], strict=True)]
    return Result(answers, got["wall"], got["server_cpu"], got["cpu"], nbytes)


# ---------------------------------------------------------------------------------------------------------- the servers


PATH = "/v1/chat/completions"
LOAD_SECONDS = 120.0
LIMIT_SECONDS = 240.0
RUNNING, CHUNK = 64, 32  # requests at a time; tokens of prompts in a step
_STOCK = ("-m", "mlx_lm.server", "--port", "{port}", "--log-level", "ERROR", "--model", "{model}")
_KVPOOL = ("-m", "kvpool", "serve", "--port", "{port}", "--model", "{model}")
SERVERS: dict[str, tuple[str, ...]] = {
    "kvpool": (*_KVPOOL, "--max-running", f"{RUNNING}", "--chunk", f"{CHUNK}"),
    "kvpool, defaults": _KVPOOL,
    "stock, tuned": (
        *(*_STOCK, "--decode-concurrency", f"{RUNNING}", "--prompt-cache-size", "256"),
        *("--prompt-concurrency", "1", "--prefill-step-size", "256"),
    ),
    "stock": _STOCK,
}
"""Arguments of the interpreter. "stock" is mlx-lm's server as it ships, and "stock, tuned" the fastest of twelve
settings that we tried with the default workload and the tiny model.
"""


@dataclass(frozen=True)
class Server:
    """A process that serves."""

    pid: int
    port: int

    def get(self, path: str) -> str:
        """Return the text of an answer."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
            return str(answer.read().decode())

    def kilobytes(self, name: str) -> int:
        """Return a field of the process's status, such as VmHWM."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@contextmanager
def started(arguments: Sequence[str], model: str) -> Iterator[Server]:
    """Yield a server that answers ``/health``. Raise `CommandError` if it does not."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    filled = [argument.format(port=port, model=model) for argument in arguments]
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "MLX_DEFAULT_DEVICE": "cpu"}
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen([sys.executable, *filled], stdout=said, stderr=said, env=offline)
        server = Server(process.pid, port)
        try:
            end = time.monotonic() + LOAD_SECONDS
            while not _is_ready(server):
                if process.poll() is not None or time.monotonic() > end:
                    said.seek(0)
                    last = said.read().decode(errors="replace").strip().rpartition("\n")[2]
                    raise CommandError(f"{' '.join(filled[:3])}: did not start: {last[:200]}")
                time.sleep(0.1)
            yield server
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def _is_ready(server: Server) -> bool:
    with suppress(OSError):
        server.get("/health")
        return True
    return False


def send(server: Server, chats: Sequence[Chat]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Send chats from the process of the clients. Return what was asked and what came."""
    asked = {"address": ["127.0.0.1", server.port], "pid": server.pid, "path": PATH, "limit": LIMIT_SECONDS}
    asked["requests"] = [chat.as_json() for chat in chats]
    clients = [sys.executable, "-m", "benchmarks.http_clients"]
    done = subprocess.run(clients, input=json.dumps(asked), capture_output=True, text=True, check=True)
    return asked, json.loads(done.stdout)


def measure(arguments: Sequence[str], model: str, chats: Sequence[Chat], warm_up: Sequence[Chat]) -> Result:
    """Return a run of a fresh server."""
    with started(arguments, model) as server:
        send(server, warm_up)
        before = server.kilobytes("VmRSS")
        asked, got = send(server, chats)
        return result(asked, got, 1024 * (server.kilobytes("VmHWM") - before))


# ----------------------------------------------------------------------------------------------------- tables and gates


OURS = "kvpool"
RATE, TTFT, ITL = 1.2, 0.5, 3.0
Runs = Mapping[str, Sequence[Result]]


def figure(runs: Sequence[Result], name: str) -> float | None:
    """Return the median of a figure over runs; None if a run has none."""
    found = [run.as_json()[name] for run in runs]
    return None if None in found else median(found)


def same_texts(runs: Runs) -> float:
    """Return the share of chats whose right answers have the same text, in all runs of all servers."""
    chats = zip(*(run.answers for found in runs.values() for run in found), strict=True)
    same = [len({answer.text for answer in one if answer.failure is None}) <= 1 for one in chats]
    return sum(same) / len(same)


def compared(runs: Runs) -> list[Gate]:
    """Return what has to hold. In each figure, ours is compared with the best of all settings of stock."""
    ours, stock = runs[OURS], [found for name, found in runs.items() if name.startswith("stock")]
    failures = [failure for run in ours for failure in run.failures]
    decided = [
        Gate("failures", len(failures), 0, True, ", ".join(sorted(set(failures)))),
        Gate("the same text from all servers, share of the chats", same_texts(runs), 1.0),
    ]
    for what, key, best, limit, at_most in (
        ("tokens/s over stock's", "tokens_per_sec", max, RATE, False),
        ("tokens/s of CPU time over stock's", "tokens_per_cpu_sec", max, RATE, False),
        ("p99 to first token over stock's", "ttft_ms_p99", min, TTFT, True),
        ("p99 to first token over stock's, CPU time", "ttft_cpu_ms_p99", min, TTFT, True),
    ):
        own, others = figure(ours, key), [figure(found, key) for found in stock]
        known = [other for other in others if other is not None]
        value = None if own is None or not known else own / best(known)
        decided.append(Gate(what, value, limit, at_most, "" if own is None else short(own)))
    p50, p99 = figure(ours, "itl_cpu_ms_p50"), figure(ours, "itl_cpu_ms_p99")
    ratio = p99 / p50 if p50 and p99 is not None else None
    return [*decided, Gate("between tokens, p99 / p50, CPU time", ratio, ITL, True)]


def tables(runs: Runs) -> Iterator[str]:
    """Yield tables: medians over the runs. Times are milliseconds, by the clock and by the CPU time of the server."""

    def shown(found: Sequence[Result], *names: str) -> list[str]:
        return ["" if (value := figure(found, name)) is None else short(value) for name in names]

    keys = ("tokens_per_sec", "tokens_per_cpu_sec", "wall_seconds", "cpu_seconds", "clients_cpu_seconds")
    lines = [["", "tokens/s", "by CPU time", "seconds", "CPU", "clients' CPU", "grown by, MiB", "failures"]]
    for name, found in runs.items():
        failures = sum(len(run.failures) for run in found)
        lines.append(
            [name, *shown(found, *keys), f"{(figure(found, 'grown_nbytes') or 0) / 2**20:,.0f}", f"{failures}"]
        )
    yield table(*lines) + "\n"
    lines = [["ms", *(f"p{p}, {by}" for p in PERCENTILES for by in ("clock", "CPU"))]]
    for key, title in {"ttft": "to first token", "itl": "between tokens"}.items():
        names = [f"{key}{by}_ms_p{p}" for p in PERCENTILES for by in ("", "_cpu")]
        lines += [[f"{title}, {name}", *shown(found, *names)] for name, found in runs.items()]
    yield table(*lines) + "\n"
    yield f"the same text from all servers: {same_texts(runs):.1%} of the chats"


OVERHEAD = 0.1
NO_END = {256: -100.0}  # of the tiny model: answers are as long as they may be
AT_ONCE = Shape(RUNNING, float("inf"), 1, 64, "16")  # all at once; nearly all steps are 64 decodes
SHORT, LONG = 100, 400  # tokens of answers: their difference has no cost of a request


def overhead(model: str, repetitions: int) -> Gate:
    """Return the share of a token that HTTP takes, and say what a request takes besides. The runs take turns."""
    times: dict[tuple[Callable[[str, int, int], float], int], list[float]] = {}
    for seed in range(repetitions):
        for run, length in product((_by_http, _alone), (SHORT, LONG)):
            times.setdefault((run, length), []).append(run(model, seed, length))

    def shares(run: Callable[[str, int, int], float]) -> tuple[float, float]:
        """Return the CPU seconds of a token, and of a request without its tokens."""
        short, long = median(times[run, SHORT]), median(times[run, LONG])
        token = (long - short) / (LONG - SHORT)
        return token, short - SHORT * token

    (ours, request), (base, engine) = shares(_by_http), shares(_alone)
    more = f"{1e6 * (ours - base):.0f} us more than {1e6 * base:.0f} us of a token, {RUNNING} streams"
    note = f"{more}; {1e3 * (request - engine):.1f} ms more than {1e3 * engine:.1f} ms of a request"
    return Gate("CPU time of HTTP, share of a token", ours / base - 1, OVERHEAD, True, note)


def _endless(seed: int, length: int) -> list[Chat]:
    """Return chats whose answers have this length."""
    bias = {str(token): bias for token, bias in NO_END.items()}
    chats = replace(AT_ONCE, seed=seed, output=f"{length}").chats()
    return [replace(chat, fields=(("logit_bias", bias),)) for chat in chats]


def _by_http(model: str, seed: int, length: int) -> float:
    """Return the CPU seconds of an answer that the server sends."""
    with started(SERVERS["kvpool"], model) as server:
        send(server, _endless(seed + 1000, SHORT))
        found = result(*send(server, _endless(seed, length)))
    return found.cpu / RUNNING if not found.failures else float("nan")


def _alone(model: str, seed: int, length: int) -> float:
    """Return the CPU seconds of an answer of the engine."""
    from kvpool.adapters.mlx_lm import Engine, loading

    loaded, tokenizer = loading.load(model)
    seconds = 0.0
    budgets: dict[str, Any] = {"max_running": RUNNING, "prefill_chunk": CHUNK}
    budgets["max_step_tokens"] = max(2 * CHUNK, RUNNING)
    with Engine(loaded, 2048, tokenizer=tokenizer, **budgets) as engine:
        for chats in (_endless(seed + 1000, SHORT), _endless(seed, length)):
            prompts = [chat.as_json()["body"]["messages"] for chat in chats]
            begin = time.process_time()
            engine.batch(prompts, max_tokens=chats[0].max_tokens, logit_bias=NO_END)
            seconds = time.process_time() - begin
    return seconds / RUNNING


# ---------------------------------------------------------------------------------------------------------- the command


OPTIONS = {
    "model": ("tiny", "a Llama with random weights: tiny, medium"),
    **{field.name.replace("_", "-"): (field.default, SENT[field.name]) for field in fields(Shape)},
    "servers": ("", f"which of {'; '.join(SERVERS)} (default: all)"),
    "repetitions": (1, "runs of each; the median counts"),
    "part": ("compare", "what to measure: compare, overhead"),
    "gates": (False, "judge what has to hold; 1 if something does not"),
}


def run(args: argparse.Namespace) -> int:
    """Run all servers in turns and print tables, and with ``--gates`` what has to hold: 1 if something does not."""
    names = args.servers.split(";") if args.servers else [*SERVERS]
    for option, value, known in (("part", [args.part], ("compare", "overhead")), ("servers", names, SERVERS)):
        for one in value:
            if one not in known:
                raise CommandError(f"--{option} {one}: there are {'; '.join(known)}")
    try:
        shape = Shape(**{field.name: getattr(args, field.name) for field in fields(Shape)})
        shape.chats()
    except ValueError as error:
        raise CommandError(f"no such chats: {error}") from None
    try:
        from benchmarks import serving_lm as lm
    except ImportError as exc:
        raise CommandError(f"needs mlx and mlx-lm: pip install 'kvpool[mlx]' ({exc})") from None
    with tempfile.TemporaryDirectory(prefix="kvpool-http-") as folder:
        model = f"{folder}/model"
        lm.save(args.model, Path(model))
        if args.part == "overhead":
            return judged([overhead(model, args.repetitions)], args)
        runs = measured(names, model, shape, args.repetitions)
    decided = compared(runs) if args.gates else []
    if not args.json:
        return judged(decided, args, tables(runs))
    told: dict[str, Any] = {
        "kvpool": kvpool.__version__,
        "machine": {"platform": platform.platform(), "cpu": cpu_model()},
    }
    told |= {"model": args.model, "workload": asdict(shape), "same_texts": same_texts(runs)}
    told |= {"runs": {name: [run.as_json() for run in found] for name, found in runs.items()}}
    print(json.dumps(told | {"gates": [gate.as_json() for gate in decided]}, indent=2))
    return int(not all(gate.holds for gate in decided))


def measured(names: Sequence[str], model: str, shape: Shape, repetitions: int) -> dict[str, list[Result]]:
    """Return the runs of each server. All take turns, each time in another order."""
    warm_up = replace(shape, requests=4, systems=1, system_tokens=64, output="4", seed=shape.seed + 1).chats()
    chats, runs = shape.chats(), {name: list[Result]() for name in names}
    for repetition in range(repetitions):
        turn = repetition % len(names)
        for name in [*names[turn:], *names[:turn]]:
            print(f"{name}: run {repetition + 1} of {repetitions}", file=sys.stderr, flush=True)
            runs[name].append(measure(SERVERS[name], model, chats, warm_up))
    return runs


if __name__ == "__main__":
    sys.exit(main())
