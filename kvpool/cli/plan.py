"""Size a pool for a model: what its layers keep, what that costs, how many blocks and sequences fit."""

from __future__ import annotations

import argparse
import json

from kvpool.cli.console import CommandError, nbytes, whole
from kvpool.cli.options import TINY, add_bits_arguments, add_model_arguments, bits_of, by_flags
from kvpool.errors import install_command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_model_arguments(
        parser, "CONFIG", "a config.json, the folder that holds it, a repository in the Hugging Face Hub's local cache"
    )
    text = "bytes for the KV cache, such as 16GiB or 512MB; auto looks at this machine"
    parser.add_argument("--memory", required=True, metavar="SIZE", help=text)
    parser.add_argument("--block-size", default="16", metavar="TOKENS", help="tokens per block (default: %(default)s)")
    parser.add_argument("--dtype", help="element type of the cache (default: the model's)")
    text = "the longest sequence to count (default: the model's limit)"
    parser.add_argument("--max-len", metavar="TOKENS", help=text)
    add_bits_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the calculation."""
    from kvpool.config import DTYPES, describe_plan

    block_size = whole("--block-size", args.block_size)
    max_len = None if args.max_len is None else whole("--max-len", args.max_len)
    if args.dtype not in (None, *DTYPES):
        raise CommandError(f"--dtype {args.dtype}: not one of {', '.join(DTYPES)}")
    memory = "auto" if args.memory == "auto" else nbytes("--memory", args.memory)
    bits = bits_of(args)
    if "kv_bits" in bits:
        bits["k_bits"] = bits["v_bits"] = bits.pop("kv_bits")
    model, dtype = args.model, args.dtype
    try:
        if model == TINY:
            from kvpool.adapters.mlx_lm import tiny

            model, dtype = tiny.CONFIG, dtype or "float32"
        facts, text = describe_plan(model, memory, block_size, dtype, max_len, **bits)
    except ImportError as exc:
        raise CommandError(f"--model {TINY} needs mlx-lm ({exc}): {install_command('mlx')}") from None
    except FileNotFoundError:
        where = "no such file or folder, nor a model in the local cache of the Hugging Face Hub"
        raise CommandError(f"--model {args.model}: {where}") from None
    except OSError as exc:
        raise CommandError(f"--model {args.model}: {exc.strerror or exc}") from None
    except (TypeError, ValueError) as exc:
        raise CommandError(by_flags(exc)) from None
    print(json.dumps(facts, indent=2) if args.json else text)
    return 0
