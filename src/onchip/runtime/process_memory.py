"""The memory of this process."""

from __future__ import annotations

import sys


def peak_process_bytes() -> int:
    """The most memory that this process has had so far; 0: unknown."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10  # elsewhere in KiB
