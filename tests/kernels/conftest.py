from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kernels.native import NativeKernels


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    # Imported here, so that loading this file leaves it to others how torch is set up.
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def native() -> NativeKernels:
    """The native kernels, from the user's cache: the first run after a change compiles them."""
    from kernels.native import NativeUnavailable, load_native

    try:
        return load_native()
    except NativeUnavailable as error:
        pytest.skip(f"needs the native kernels: {error}")


@pytest.fixture(params=["torch", "native"])
def maybe_native(request: pytest.FixtureRequest) -> NativeKernels | None:
    """None for the torch reference, then the native kernels: tests run with both."""
    chosen: NativeKernels | None = None
    if request.param == "native":
        chosen = request.getfixturevalue("native")
    return chosen
