import sys

from benchmarks.attention import command
from benchmarks.command import main

sys.exit(main(command))
