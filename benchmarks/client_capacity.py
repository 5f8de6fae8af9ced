"""How truthful is the load generator, and how far? Against a mock server of known truth, on one core each.

    python benchmarks/client_capacity.py [--json FILE] [--quick] [--workers N]

The same as `breakeven bench-client`, which does the work: streams started at once, then a ladder of paced rates up to
the highest at which the mean TTFT error stays within 5 ms and the mean error of a gap within 5% of the true gap.
"""

from __future__ import annotations

import sys

from breakeven.cli.main import app

if __name__ == "__main__":
    app(["bench-client", *sys.argv[1:]])
