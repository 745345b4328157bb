"""Load is no failure: how long a test takes depends on what else the machine does."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=1)
@given(st.just(True))
def test_an_example_may_take_long(slow: bool) -> None:
    time.sleep(0.3 * slow)  # hypothesis would end an example of 0.2 s as a failure
