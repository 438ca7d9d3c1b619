"""Waiting for what another process or thread does."""

import time

BUSY = 4.0  # a machine that runs other tests, too, may take so many times as long


def until(condition, seconds: float = 60.0, every: float = 0.05):
    """Wait until something is true, and return it. `seconds`: in which it happens on a quiet machine. AssertionError
    after `BUSY` times as long."""
    end = time.monotonic() + BUSY * seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"it did not happen within {BUSY * seconds:g} s"
        time.sleep(every)
    return found


def stands(value, seconds: float = 1.5, within: float = 10.0):
    """Wait until a value has been the same for so many seconds, and return it.

    AssertionError if it moves for longer than `within`."""
    seen, since, end = value(), time.monotonic(), time.monotonic() + within
    while time.monotonic() < since + seconds:
        assert time.monotonic() < end, f"it did not come to rest within {within:g} s"
        time.sleep(0.05)
        if (now := value()) != seen:
            seen, since = now, time.monotonic()
    return seen
