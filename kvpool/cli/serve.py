"""Serve a model with mlx-lm's own OpenAI-style HTTP server, on a paged KV cache."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
from contextlib import ExitStack
from typing import Any, NoReturn

from kvpool.cli.cache import add_cache_arguments, bits_of, policy_of
from kvpool.cli.console import CommandError, whole
from kvpool.cli.model import add_model_arguments, tiny_model
from kvpool.errors import install_command
from kvpool.groups import arenas_of

LAST_PORT = 65535
leave = os._exit
PASSES_ON = True  # unknown arguments go to mlx-lm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of kvpool."""
    parser.epilog = (
        "Every other argument is one of mlx_lm.server: --decode-concurrency, --prompt-concurrency, --max-tokens,"
        " --temp, --draft-model, --log-level and so on. GET /metrics has statistics for Prometheus."
    )
    add_model_arguments(parser, "PATH_OR_ID", "a folder, a repository of the Hugging Face Hub")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", default="8080", help="port to listen on, 0 for any (default: %(default)s)")
    parser.add_argument(
        "--kv-block-size", default="16", metavar="TOKENS", help="tokens per block of the cache (default: %(default)s)"
    )
    parser.add_argument("--num-blocks", metavar="N", help="blocks of the cache (default: what runs at a time may need)")
    parser.add_argument("--memory", metavar="SIZE", help="size the cache by memory, 2GiB or auto, not by --num-blocks")
    add_cache_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted; 0 if no block was left behind, else 1."""
    block_size, port = whole("--kv-block-size", args.kv_block_size), whole("--port", args.port, 0)
    if port > LAST_PORT:  # the socket would take what is left of it after division by 65536
        raise CommandError(f"--port {args.port}: out of range, 0..{LAST_PORT}")
    num_blocks = None if args.num_blocks is None else whole("--num-blocks", args.num_blocks, 4)
    policy, bits = policy_of(args, block_size), bits_of(args)
    for argument in args.rest:
        if argument.partition("=")[0] == "--quantized-kv-start":
            raise CommandError("--quantized-kv-start: blocks are quantized from the first token on; leave it out")
    if args.memory is not None and num_blocks is not None:
        raise CommandError("--memory and --num-blocks exclude each other")
    try:
        from kvpool.adapters.mlx_lm import loading, server
    except ImportError as exc:
        raise CommandError(f"needs mlx-lm ({exc}): {install_command('mlx')}") from None
    tiny = tiny_model(args)
    if tiny is None:
        try:
            loading.check_name(args.model)
        except loading.ModelNotLoaded as exc:
            raise CommandError(f"--model {exc}") from None
    pools: list[Any] = []

    def tell(httpd: Any, provider: Any) -> None:
        host, bound = httpd.server_address[:2]
        pools.append(provider.kv.pool)
        facts = {"url": f"http://{host}:{bound}", "model": args.model, "route": provider.kv.route}
        facts |= {"num_blocks": provider.kv.pool.num_blocks, "block_size": block_size}
        facts |= {"eviction": args.eviction, "max_kv": None if policy is None else policy.max_kv} | {"bits": bits}
        if args.json:
            print(json.dumps(facts), flush=True)
            return
        print(
            f"kvpool serve: {facts['url']}/v1, {args.model} on {facts['num_blocks']} blocks of {block_size} tokens, "
            f"attention: {facts['route']}, {'nothing leaves' if policy is None else policy}; "
            f"statistics at {facts['url']}/metrics",
            file=sys.stderr,
            flush=True,
        )

    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _interrupt))
        model, names = args.model, []
        if tiny is not None:
            model = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-tiny-"))
            tiny.save(model, args.arch)
            names = [(args.model, model)]
        options = server.PoolOptions(block_size, num_blocks, args.memory, tuple(names), policy, tuple(bits.items()))
        arguments = ["--model", model, "--host", args.host, "--port", str(port), *args.rest]
        try:
            server.serve(arguments, options, tell)
        except Exception as exc:
            text = " ".join(str(exc).split()).rpartition("] ")[2]
            raise CommandError(f"--model {args.model}: {type(exc).__name__}: {text[:200]}") from exc
    left = sum(pool.stats(arena).used for pool in pools for arena in set(arenas_of(pool.options.groups)))
    print(f"kvpool serve: stopped, {left} blocks in use", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    leave(1 if left else 0)  # threads that still answer a request must not run while the interpreter shuts down
    return 1 if left else 0


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt
