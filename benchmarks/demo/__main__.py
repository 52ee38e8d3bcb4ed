import sys

from benchmarks.command import main
from benchmarks.demo import command

sys.exit(main(command))
