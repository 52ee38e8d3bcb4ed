import sys

from benchmarks.command import main
from benchmarks.replay import command

sys.exit(main(command))
