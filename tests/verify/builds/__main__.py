"""``python -m tests.verify.builds VARIANT [ARGUMENTS OF PYTHON]``: build a copy, and run Python in it."""

import sys

from tests.verify.builds import VARIANTS, build, run


def main() -> int:
    """Build a variant; run Python in it when more arguments follow."""
    variant, *rest = sys.argv[1:] or [""]
    if variant not in VARIANTS:
        print(f"usage: python -m tests.verify.builds {{{','.join(VARIANTS)}}} [arguments of python]", file=sys.stderr)
        return 2
    print(f"==> {build(variant)}", flush=True)
    return run(variant, rest, stdout=None).returncode if rest else 0


if __name__ == "__main__":
    sys.exit(main())
