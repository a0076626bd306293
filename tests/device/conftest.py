"""The device that is not there, as a fixture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import Device, cuda_device, guard


@pytest.fixture
def device() -> Iterator[Device]:
    """A card of sm_90 with 8 GiB, nothing on it; only where one can be made."""
    if obstacle := guard.obstacle():
        pytest.skip(obstacle)
    pytest.importorskip("triton", reason="needs triton (Linux)")
    with cuda_device() as device:
        yield device
