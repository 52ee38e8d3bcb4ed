import sys

from benchmarks.command import main
from benchmarks.hybrid import command

sys.exit(main(command))
