import sys

from benchmarks.command import main
from benchmarks.models import command

sys.exit(main(command))
