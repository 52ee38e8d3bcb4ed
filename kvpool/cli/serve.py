"""Serve a model over HTTP, with the APIs of OpenAI and Anthropic, on a paged KV cache."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import re
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from kvpool.cli.console import CommandError, nbytes, real, whole
from kvpool.cli.options import (
    add_cache_arguments,
    add_draft_arguments,
    add_model_arguments,
    add_store_arguments,
    bits_of,
    blocks_in_memory,
    by_flags,
    engine_options,
    load_draft_model,
    memory_of,
    num_drafts_of,
    place_of,
    proposer,
    store_of,
)
from kvpool.cli.wired import add_wired_argument, fit_wired, limit_of, wired
from kvpool.config import memory_nbytes
from kvpool.errors import install_command

if TYPE_CHECKING:
    from kvpool.adapters.mlx_lm.engine import Engine
    from kvpool.serving.app import Settings
    from kvpool.serving.memory import Memory

leave = os._exit
LAST_PORT = 65535
LAST_SECONDS = 1.0  # for the last line
KEPT_FREE = 10  # of the machine's memory, the part that stays available for others
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
LONGEST = 32768  # tokens of a request at most, for the default size of the pool
OPTIONS: tuple[tuple[str, str, str | None, str], ...] = (
    ("--host", "HOST", "127.0.0.1", "address to listen on (default: %(default)s)"),
    ("--port", "N", "8080", "port to listen on, 0 for any (default: %(default)s)"),
    ("--max-tokens", "N", "512", "tokens to generate if a request does not say how many (default: %(default)s)"),
    ("--max-running", "N", "32", "samples that run at a time, at most (default: %(default)s)"),
    ("--max-waiting", "N", "256", "prompts that wait, at most; more get status 429 (default: %(default)s)"),
    ("--max-connections", "N", "1024", "requests at a time, at most; more get status 503 (default: %(default)s)"),
    ("--max-model-len", "TOKENS", None, "tokens of a prompt and its answer, at most (default: what the model takes)"),
    ("--chunk", "TOKENS", "256", "tokens of a prompt in one step, at most (default: %(default)s)"),
    ("--kv-block-size", "TOKENS", "16", "tokens per block of the cache (default: %(default)s)"),
    ("--num-blocks", "N", None, "blocks of the cache (default: for --max-running samples, as memory allows)"),
    ("--idle-release", "SECONDS", None, "idle time after which the cache gives memory back; needs --memory"),
    ("--keep-free", "SIZE", None, "memory left available for others, with --memory auto or MIN:MAX (default: 10 %%)"),
    ("--grace", "SECONDS", "30", "time for running requests to end after SIGTERM (default: %(default)s)"),
    ("--log", "FORM", "text", "text or json, a line for each request; or off, failures only (default: %(default)s)"),
    ("--temp", "T", None, "temperature if a request has none (default: the model's, or 1)"),
    ("--top-p", "P", None, "top_p if a request has none (default: the model's, or 1)"),
    ("--chat-template", "FILE", None, "a chat template in place of the model's"),
    ("--chat-template-args", "JSON", None, 'its options, if a request has none: {"enable_thinking": false}'),
    ("--allowed-origins", "URLS", None, "origins of web pages that may call it, comma-separated; * for all"),
    ("--api-keys", "FILE", None, "keys of tenants, one a line: NAME WEIGHT KEY"),
    ("--events", "URL", None, "where to publish events of the prefix cache, as vLLM does: tcp://127.0.0.1:5557"),
    ("--events-replay", "URL", None, "where readers of --events ask for events that they missed"),
)
REPEATED = (
    ("--name", "NAME", "what clients call the model; repeatable (default: the text of --model)"),
    ("--api-key", "KEY", "a key for clients; repeatable"),
    ("--allow-host", "NAME", "another name that the Host header may have; repeatable"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments. `run` reads the numbers."""
    parser.epilog = (
        "GET /metrics has statistics for Prometheus, and needs a key if there are keys. The environment variable "
        "KVPOOL_API_KEY holds one more key."
    )
    add_model_arguments(parser, "PATH_OR_ID", "a folder, a repository of the Hugging Face Hub")
    for name, metavar, text in REPEATED:
        parser.add_argument(name, action="append", default=[], metavar=metavar, help=text)
    for name, metavar, default, text in OPTIONS:
        parser.add_argument(name, metavar=metavar, default=default, help=text)
    parser.add_argument("--strict", action="store_true", help="refuse requests with unknown fields")
    parser.add_argument("--no-page", action="store_true", help="serve no status page at /")
    add_draft_arguments(parser)
    add_cache_arguments(parser)
    add_store_arguments(parser)
    add_wired_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal. Return 0 if all blocks came back, else 1."""
    port = whole("--port", args.port, 0, LAST_PORT)  # the socket would take a larger one modulo 65536
    bounds, _ = bounds_of(args), limit_of(args.wired)
    keys, weights = read_keys(args)
    if args.host not in ("localhost", "127.0.0.1", "::1") and not keys:
        sources = "--api-key, --api-keys or the variable KVPOOL_API_KEY"
        raise CommandError(f"--host {args.host}: others can reach this address, so a key is needed: {sources}")
    options = engine_options(args, 4) | {"weights": weights, "store": store_of(args)}
    options["max_waiting"] = whole("--max-waiting", args.max_waiting)
    if args.max_model_len is not None:
        options["max_model_len"] = whole("--max-model-len", args.max_model_len)
    num_drafts_of(args)
    grace, wanted = real("--grace", args.grace, 0, 86400), whole("--max-connections", args.max_connections)
    try:
        from kvpool.adapters.mlx_lm import loading
        from kvpool.serving import process, telemetry
        from kvpool.serving.app import Settings
    except ImportError as exc:
        raise CommandError(f"needs mlx-lm and a web server ({exc}): {install_command('serve')}") from None
    host = f"[{args.host}]" if ":" in args.host else args.host
    hosts = frozenset(name.lower() for name in (*LOOPBACK, host, *args.allow_host))
    connections = process.allowed_connections(wanted)
    if connections < wanted:
        say(f"kvpool serve: --max-connections {wanted}: the system allows files for {connections}", args.log)
    settings = Settings(
        tuple(args.name or [args.model]),
        hosts,
        keys,
        weights,
        max_tokens=whole("--max-tokens", args.max_tokens),
        max_connections=connections,
        **settings_of(args),
    )
    if args.log not in telemetry.FORMS:
        raise CommandError(f"--log {args.log}: not one of {', '.join(telemetry.FORMS)}")
    publisher = publisher_of(args)
    options["on_events"] = publisher and publisher.publish
    if args.model != "tiny":
        try:
            loading.check_name(args.model)
        except loading.ModelNotLoaded as exc:
            raise CommandError(f"--model {exc}") from None
    try:
        sock = process.listen(args.host, port)
    except OSError as exc:  # it is bound before the model is loaded, and listens after it
        raise CommandError(f"--host {args.host} --port {port}: {exc.strerror}") from None
    try:
        url = f"http://{host}:{sock.getsockname()[1]}"
        say(f"kvpool serve: loading {args.model} ...", args.log)
        memory: list[Memory] = []
        make, on_ready = partial(make_engine, args, options, settings, bounds, memory), partial(tell, args, url)
        with telemetry.to_stderr(args.log), wired(args.wired):
            left = asyncio.run(process.serve(make, settings, sock, on_ready, grace, memory))
        said, status = "the engine was lost" if left < 0 else f"stopped, {left} blocks in use", 1 if left else 0
    except OSError as exc:
        said, status = f"--host {args.host} --port {port}: {exc.strerror}", 2
    except (CommandError, loading.ModelNotLoaded) as exc:
        said, status = f"{'' if isinstance(exc, CommandError) else '--model '}{exc}", 2
    except (ValueError, TypeError, RuntimeError, MemoryError) as exc:
        said, status = f"--model {args.model}: {by_flags(exc) or 'not enough memory'}", 2
    if publisher is not None:
        publisher.close()
    told = f"kvpool serve: {said}", args.log, "error" if status else "info"
    last = threading.Thread(target=say, args=told, daemon=True)
    last.start()
    last.join(LAST_SECONDS)  # nobody may read it, and its pipe be full
    leave(status)  # threads of MLX must not run while the interpreter shuts down
    return status


class Bounds(NamedTuple):
    """What --memory, --idle-release and --keep-free say; sizes are bytes, None: it follows from the model."""

    least: int | None
    yields: bool  # to others
    idle_release: float
    keep_free: int


def bounds_of(args: argparse.Namespace) -> Bounds | None:
    """Return between what sizes the cache may change; None if it is fixed. --memory becomes its upper bound."""
    least, colon, most = (args.memory or "").rpartition(":")
    idle = math.inf if args.idle_release is None else real("--idle-release", args.idle_release, 1)
    if args.memory is None and args.idle_release is not None:
        raise CommandError(f"--idle-release {args.idle_release}: needs --memory auto, BYTES or MIN:MAX")
    yields = bool(colon) or args.memory == "auto"
    if args.keep_free is not None and not yields:
        raise CommandError(f"--keep-free {args.keep_free}: needs --memory auto or MIN:MAX")
    if colon:
        low, high = nbytes("--memory", least), nbytes("--memory", most)
        if low > high:
            raise CommandError(f"--memory {args.memory}: {least} is above {most}; write MIN:MAX")
        args.memory = most
    memory_of(args)
    total = memory_nbytes()
    free = total // KEPT_FREE if args.keep_free is None else nbytes("--keep-free", args.keep_free)
    if free >= total:
        raise CommandError(f"--keep-free {args.keep_free}: the machine has {total} bytes in all")
    return Bounds(low if colon else None, yields, idle, free) if yields or idle < math.inf else None


def governed(
    args: argparse.Namespace, bounds: Bounds, options: dict[str, Any], model: Any, draft: Any, most: int
) -> int:
    """Return the least blocks that the cache has. `options` limits requests to those, and begins with what is free."""
    from kvpool.adapters.mlx_lm import loading
    from kvpool.adapters.mlx_lm.shapes import max_positions
    from kvpool.serving.memory import seen

    size, asked, now = options["block_size"], options.get("max_model_len"), seen()
    longest = asked or min(max_positions(model) or LONGEST, LONGEST)
    is_limited = options.get("eviction") is None and loading.keeps_every_token(model)
    least = min(most, 1 + -(-longest // size))
    if bounds.least is not None:
        given = f"--memory {bounds.least}:{args.memory}"
        free = int(min(now.available, now.most_active - now.active))
        if bounds.least > free:
            raise CommandError(f"{given}: beside the model {free} bytes are available, fewer than the least size")
        rows, how = options["max_running"], {"beside": draft, **bits_of(args)}
        try:
            least = loading.blocks_in(bounds.least, model, size, rows, **how)
            free = max(bounds.least, free - bounds.keep_free)
            options["num_blocks"] = min(options["num_blocks"], loading.blocks_in(free, model, size, rows, **how))
        except ValueError as exc:
            raise CommandError(f"{given}: the least size has {by_flags(exc)}") from None
        if is_limited and asked and asked > (least - 1) * size:
            text = f"the least size holds requests of {(least - 1) * size} tokens"
            raise CommandError(f"{given}: {text}, --max-model-len is {asked}")
    if is_limited:
        options["max_model_len"] = min(longest, (least - 1) * size)
    options["num_blocks"] = max(options["num_blocks"], least)
    return least


def read_keys(args: argparse.Namespace) -> tuple[dict[str, str], dict[str, float]]:
    """Return the tenant of each key, and the weight of each tenant. A key on the command line is a tenant."""
    alone = [("--api-key", key) for key in args.api_key]
    alone += [("KVPOOL_API_KEY", key) for key in filter(None, [os.environ.get("KVPOOL_API_KEY")])]
    lines = [(source, f"api-key {number}", "1", key) for number, (source, key) in enumerate(alone, 1)]
    try:
        text = "" if args.api_keys is None else Path(args.api_keys).read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise CommandError(f"--api-keys {args.api_keys}: {getattr(exc, 'strerror', 'is not text')}") from None
    for number, line in enumerate(text.splitlines(), 1):
        parts = line.split()
        if parts and not parts[0].startswith("#"):
            source = f"--api-keys {args.api_keys}: line {number}"
            if len(parts) != 3:
                raise CommandError(f"{source}: must be NAME WEIGHT KEY")
            lines.append((source, parts[0], parts[1], parts[2]))
    keys: dict[str, str] = {}
    weights: dict[str, float] = {}
    for source, name, weight, key in lines:
        if not (key.isascii() and key):
            raise CommandError(f"{source}: a key must be ASCII, and not empty")
        share = real(f"{source}: the weight of {name}", weight, 0.001, 1000)
        if keys.setdefault(key, name) != name:
            raise CommandError(f"{source}: {name} has the same key as {keys[key]}")
        if weights.setdefault(name, share) != share:
            raise CommandError(f"{source}: {name} has two weights, {weights[name]:g} and {share:g}")
    return keys, weights


def publisher_of(args: argparse.Namespace) -> Any:
    """Return what publishes events, None: nothing does. Its addresses are bound before the model is loaded."""
    if args.events is None:
        if args.events_replay is not None:
            raise CommandError("--events-replay: needs --events")
        return None
    try:
        from kvpool.kv_events import EventPublisher
    except ImportError as exc:
        raise CommandError(f"--events needs ZMQ and msgspec ({exc}): {install_command('events')}") from None
    try:
        return EventPublisher(args.events, replay=args.events_replay)
    except OSError as exc:
        raise CommandError(f"--events: {str(exc).removeprefix('[EventPublisher] ')}") from None


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of requests that the command line has."""
    try:
        read = json.loads(args.chat_template_args or "{}")
    except ValueError:
        read = None
    if not isinstance(read, dict):
        raise CommandError(f"--chat-template-args {args.chat_template_args}: not an object of JSON")
    try:
        template = None if args.chat_template is None else Path(args.chat_template).read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise CommandError(f"--chat-template {args.chat_template}: {getattr(exc, 'strerror', 'is not text')}") from None
    origins = tuple(filter(None, map(str.strip, (args.allowed_origins or "").split(","))))
    for one in origins:
        if not re.fullmatch(r"\*|null|file://|[a-z][a-z0-9+.-]*://[^/\sA-Z]+", one):  # as browsers and Electron say it
            text = "must be *, or as https://chat.example:8000, in lower case and without a path"
            raise CommandError(f"--allowed-origins {one}: {text}")
    ranges = {"temperature": ("--temp", args.temp, 0, 100), "top_p": ("--top-p", args.top_p, 1e-9, 1)}
    return {
        "origins": origins,
        "is_strict": args.strict,
        "has_page": not args.no_page,
        "defaults": {name: real(*asked) for name, asked in ranges.items() if asked[1] is not None},
        "chat_template": template,
        "template_options": read,
    }


def sampling_of(tokenizer: Any) -> dict[str, Any]:
    """Return how its makers sample from a model: what generation_config.json says."""
    from huggingface_hub import try_to_load_from_cache

    name, file = getattr(tokenizer, "name_or_path", ""), "generation_config.json"
    path: Any = Path(name, file) if Path(name).is_dir() else name and try_to_load_from_cache(name, file)
    try:
        read = json.loads(Path(path).read_text())
    except (OSError, TypeError, ValueError):
        return {}
    numbers = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: read[name] for name in numbers if type(read.get(name)) in (int, float)}


def make_engine(
    args: argparse.Namespace,
    options: dict[str, Any],
    settings: Settings,
    bounds: Bounds | None,
    memory: list[Memory],
) -> Engine:
    """Load the model and make its engine, and within bounds what resizes its pool."""
    from kvpool.adapters.mlx_lm import Engine, loading
    from kvpool.adapters.mlx_lm.shapes import max_positions
    from kvpool.config import format_nbytes

    model, tokenizer = loading.load(args.model)
    if settings.chat_template is not None:
        tokenizer.chat_template, tokenizer.has_chat_template = settings.chat_template, True
    settings.defaults.update(sampling_of(tokenizer) | settings.defaults)
    draft = load_draft_model(args, tokenizer)
    running, size, most = options["max_running"], options["block_size"], 0
    if options["num_blocks"] is None:
        most = blocks_in_memory(args, model, size, running, draft)
        longest = min(max_positions(model) or LONGEST, LONGEST)
        is_fixed = args.memory not in (None, "auto") and bounds is None
        options["num_blocks"] = most if is_fixed else min(most, 1 + running * -(-longest // size))
    least = 0 if bounds is None else governed(args, bounds, options, model, draft, most)
    speculate = proposer(num_drafts_of(args), draft, options["num_blocks"] * size, running)
    engine = Engine(model, tokenizer=tokenizer, speculate=speculate, **options)
    if bounds is not None:
        from kvpool.adapters.mlx_lm.drafts import DraftModel
        from kvpool.governor import Governor
        from kvpool.serving.memory import Memory, unit_nbytes

        drafts = speculate if isinstance(speculate, DraftModel) else None
        unit = unit_nbytes(engine, drafts)
        governor = Governor(
            least * unit, most * unit, bounds.keep_free, idle_release=bounds.idle_release, yields=bounds.yields
        )
        memory.append(Memory(governor, running, drafts, partial(wire, args.wired)))
    wire(args.wired, engine)
    if engine.wired_nbytes:
        say(f"kvpool serve: {format_nbytes(engine.wired_nbytes)} of memory are wired at most", args.log)
    return engine


def wire(given: str, engine: Engine) -> None:
    """Set the limit of --wired for the size that the pool of an engine has now."""
    engine.wired_nbytes = fit_wired(given)


def tell(args: argparse.Namespace, url: str, engine: Engine) -> None:
    """Print the address of the server and what it runs."""
    pool = engine.kv.pool
    facts = {"url": url, "model": (args.name or [args.model])[0], "route": engine.kv.route}
    facts |= {"num_blocks": pool.num_blocks, "block_size": pool.block_size, "eviction": args.eviction}
    facts |= {"bits": bits_of(args), "store": place_of(args)}
    if args.json:
        say(json.dumps(facts), file=sys.stdout)
    else:
        say(
            f"kvpool serve: {url}/v1, {facts['model']} on {pool.num_blocks} blocks of {pool.block_size} tokens, "
            f"attention: {engine.kv.route}; statistics at {url}/metrics",
            args.log,
        )


def say(text: str, form: str = "text", level: str = "info", *, file: TextIO | None = None) -> None:
    """Print a line, to stderr by default, as --log says. A server works on if nobody can read it."""
    if form == "json":
        text = json.dumps({"time": time.strftime("%Y-%m-%d %H:%M:%S"), "level": level, "message": text})
    with suppress(OSError):
        print(text, file=file or sys.stderr, flush=True)
