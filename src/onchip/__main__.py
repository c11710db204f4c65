"""python -m onchip: the same as the command `onchip`."""

import sys

from onchip.cli.main import main

sys.exit(main())
