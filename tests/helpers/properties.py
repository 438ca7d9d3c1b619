"""Random cases by hypothesis: the same ones in every run of the tests, and a failing one is made smaller."""

import random
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st

RANDOMS = st.integers(0, 10**9).map(random.Random)  # whatever else a case consists of is drawn from this


def examples(count: int) -> Callable:
    "Settings of a test of a property: so many cases, none too slow, none remembered on the disk."
    return settings(max_examples=count, derandomize=True, deadline=None, database=None)
