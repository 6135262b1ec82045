"""How hard property tests try: `make test` is quick, `make soak` (HOTBED_SOAK=1) is thorough."""

from __future__ import annotations

import os

SOAK = os.environ.get("HOTBED_SOAK", "") not in ("", "0")


def examples(usual: int, soak: int | None = None) -> int:
    """The number of random examples: `usual`, or `soak` (50 times as many) under `make soak`.

    For tests that want other numbers than the profile's: `@settings(max_examples=examples(2000))`.
    """
    if not SOAK:
        return usual
    return usual * 50 if soak is None else soak
