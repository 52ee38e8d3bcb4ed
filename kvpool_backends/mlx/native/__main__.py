"""``python -m kvpool_backends.mlx.native build`` compiles the extension, ``... ship`` into the package, for a wheel."""

from __future__ import annotations

import sys
import time

from kvpool_backends.mlx.native import loading
from kvpool_backends.mlx.native.build import BuildError, build


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    if arguments in (["build"], ["ship"]):
        print(f"compiling for MLX {loading.MLX_VERSION} ...", flush=True)
        begin = time.perf_counter()
        try:
            made = build(loading.shipped() if arguments == ["ship"] else None)
        except BuildError as error:
            print(f"could not build the extension: {error}", file=sys.stderr)
            return 1
        print(f"{made} ({time.perf_counter() - begin:.0f} s)")
        return 0
    print("usage: python -m kvpool_backends.mlx.native {build,ship}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
