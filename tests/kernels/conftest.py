from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    # Imported here, so that loading this file leaves it to others how torch is set up.
    import torch

    torch.manual_seed(0)
