"""Settings of all tests."""

from __future__ import annotations

import torch

# The models are tiny: a second thread costs more than it brings, and very much more on a busy machine.
torch.set_num_threads(1)
