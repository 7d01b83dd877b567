"""The table that a run ends with."""

import pytest

from flows.run_commands import _print_result


def test_the_closing_table_says_which_of_its_figures_are_means_and_whose_the_verdict_is(
    capsys: pytest.CaptureFixture[str],
):
    _print_result({"iterations": 20, "kl_to_reference": 0.25, "verdict": "balanced", "accuracy_after": None}, False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["iterations", "20"]
    assert "0.25 (mean of the last 10 iterations at most)" in lines[1]
    assert "balanced (of the last iteration;" in lines[2]
    assert lines[3].split() == ["accuracy_after", "-"]
