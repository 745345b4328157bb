"""When finished sources leave the batch."""

from __future__ import annotations

import numpy as np


def staying_rows(done: np.ndarray) -> np.ndarray | None:
    """The rows of a batch that are not done [B], once those that are should leave it; None while they should stay.

    Leaving copies the caches of everyone who stays, so it waits until an eighth of the batch has finished. Nobody
    leaves a batch that is done as a whole: there is nothing left to decode faster.
    """
    finished = np.count_nonzero(done)
    worth_a_copy = 0 < finished < len(done) and 8 * finished >= len(done)
    return np.flatnonzero(~done) if worth_a_copy else None
