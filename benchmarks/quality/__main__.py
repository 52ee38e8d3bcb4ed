import sys

from benchmarks.command import main
from benchmarks.quality import command

sys.exit(main(command))
