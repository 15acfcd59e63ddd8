"""The seed of tests that draw at random: a fixed set of examples, or a new one each time.

``make test`` runs the same examples every time. With ``GOSSIPDP_EXPLORE=1``, as in ``make chaos``,
each run draws others, and pytest's header says their seed; ``GOSSIPDP_EXPLORE=SEED`` repeats them.
"""

import os
import secrets

_asked = os.environ.get("GOSSIPDP_EXPLORE", "")
SEED: int | None = None
"""The first fresh seed; None: the fixed set is run."""
if _asked:
    SEED = secrets.randbelow(10**9) + 2 if _asked == "1" else int(_asked)
    os.environ["GOSSIPDP_EXPLORE"] = str(SEED)  # the same in processes that pytest starts


def seeds(count: int) -> range:
    """``count`` seeds for schedules and the like: 0, 1, ... or those from ``SEED`` on."""
    first = SEED or 0
    return range(first, first + count)
