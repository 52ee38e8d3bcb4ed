import sys

from benchmarks.command import main
from benchmarks.serving import command

sys.exit(main(command))
