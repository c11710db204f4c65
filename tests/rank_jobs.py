"""Commands, one after the other in every rank: mpiexec -n 4 python rank_jobs.py '["run", ..]' '["run", ..]'"""

import json
import sys

from onchip.cli.main import main

if __name__ == "__main__":
    codes = [main(json.loads(command)) for command in sys.argv[1:]]
    sys.exit(max(codes))
