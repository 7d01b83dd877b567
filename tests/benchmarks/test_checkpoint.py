"""What an asynchronous save is said to cost."""

import pytest

from benchmarks.checkpoint import asynchronous_figures


@pytest.mark.parametrize(("copy", "holds"), [(0.3, True), (0.5, False), (2.0, False)])
def test_an_asynchronous_save_holds_the_step_up_as_long_as_its_copy_and_its_call_take(copy: float, holds: bool):
    """Over a save of 4 s: 0.3 s and 0.05 s are 8.75 %, 0.5 s and 0.05 s are 13.75 %."""
    blocks, *parts = asynchronous_figures(4.0, [copy] * 5, [0.05] * 5)
    assert blocks.value == pytest.approx((copy + 0.05) / 4.0)
    assert (blocks.ok, blocks.target) == (holds, 0.1)
    assert [part.value for part in parts] == [pytest.approx(copy / 4.0, abs=1e-4), pytest.approx(0.0125)]
