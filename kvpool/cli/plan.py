"""Size a pool for a model: what its layers keep, what that costs, how many blocks and sequences fit."""

from __future__ import annotations

import argparse
import json

from kvpool.cli.console import CommandError, nbytes
from kvpool.cli.options import add_bits_arguments, add_model_arguments, bits_of, tiny_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_model_arguments(
        parser, "CONFIG", "a config.json, the folder that holds it, a repository in the Hugging Face Hub's local cache"
    )
    parser.add_argument(
        "--memory",
        required=True,
        metavar="SIZE",
        help="bytes for the KV cache, such as 16GiB or 512MB; auto looks at this machine",
    )
    parser.add_argument(
        "--block-size", type=int, default=16, metavar="TOKENS", help="tokens per block (default: %(default)s)"
    )
    parser.add_argument("--dtype", help="element type of the cache (default: the model's)")
    parser.add_argument(
        "--max-len",
        type=int,
        metavar="TOKENS",
        help="the longest sequence to count (default: the model's limit)",
    )
    add_bits_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the calculation."""
    from kvpool.config import describe_plan

    memory = "auto" if args.memory == "auto" else nbytes("--memory", args.memory)
    bits = bits_of(args)
    if "kv_bits" in bits:
        bits["k_bits"] = bits["v_bits"] = bits.pop("kv_bits")
    tiny = tiny_model(args)
    model = args.model if tiny is None else {**tiny.config(args.arch), "dtype": "float32"}
    try:
        facts, text = describe_plan(model, memory, args.block_size, args.dtype, args.max_len, **bits)
    except OSError as exc:
        raise CommandError(f"--model {args.model}: {exc.strerror or exc}") from None
    except (TypeError, ValueError) as exc:
        raise CommandError(str(exc)) from None
    print(json.dumps(facts, indent=2) if args.json else text)
    return 0
