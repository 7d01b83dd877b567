"""Answers of ranks: what adds up, and what must be the same."""

import math

import pytest

from tasks.replies import Replies

HERE = {"epoch": 0, "start": 8, "identity": "a"}


def test_what_every_rank_found_out_alike_is_taken_once():
    assert Replies(statuses=[{"next_position": HERE}, {"next_position": dict(HERE)}]).agreed("next_position") == HERE


def test_ranks_that_read_other_data_are_named():
    replies = Replies(statuses=[{"next_position": HERE}, {"next_position": {**HERE, "identity": "b"}}])
    with pytest.raises(ValueError, match=r"ranks disagree on next_position: rank 0 says .*'a'.* and rank 1 .*'b'"):
        replies.agreed("next_position")


def test_numbers_of_ranks_add_up_and_maxima_are_compared():
    statuses = [{"metrics": {"x": 1.0, "x/count": 2.0, "y/max": 3.0}}, {"metrics": {"x": 4.0, "x/count": 1.0}}, {}]
    assert Replies(statuses=statuses).sums == {"x": 5.0, "x/count": 3.0, "y/max": 3.0}


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_maximum_that_is_no_number_on_any_rank_is_none_of_all(place: int):
    found = [1.0, 3.0, 2.0]
    found[place] = math.nan
    assert math.isnan(Replies(statuses=[{"metrics": {"ratio/max": one}} for one in found]).sums["ratio/max"])
