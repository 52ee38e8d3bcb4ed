import sys

from benchmarks.command import main
from benchmarks.http import command

sys.exit(main(command))
