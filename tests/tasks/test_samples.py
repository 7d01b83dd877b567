"""Every row of an iteration is kept with what a person wants to read of it."""

from pathlib import Path

import pytest

from resources.samples import cut_samples, read_samples_of, sample_files, spread
from tasks.samples import SHOWN_CHARACTERS
from tests.tasks.local_cast import SmallCast, small_config


def test_every_row_is_kept_with_text_scores_advantages_lengths_and_version(small_cast: SmallCast, tmp_path: Path):
    more = ("algorithm.name=rloo", "algorithm.kl.coef=0.0", "telemetry.samples_per_iteration=5")
    run = small_cast.run(small_config(*more))
    run.samples_folder = tmp_path
    metrics = run.iterate()
    run.iterate()
    files = sample_files(tmp_path)
    assert list(files) == [0, 1]
    rows = read_samples_of(files[0])
    assert len(rows) == 32
    assert sum(row["score"] for row in rows) / 32 == pytest.approx(metrics["reward/score_mean"])
    for row in rows:
        assert row["answer"] == "".join(sorted(row["prompt"][:-1]))
        assert row["score"] == row["grader/exact"] == float(row["response"] == row["answer"])
        assert (row["prompt_length"], row["response_length"]) == (6, 6)
        assert (row["finish_reason"], row["policy_version"], row["source"]) == ("stop", 0, "sorting")
    for group in {row["group_id"] for row in rows}:
        siblings = [row for row in rows if row["group_id"] == group]
        mean = sum(row["score"] for row in siblings) / 4
        # Leave-one-out: (r - mean) * n / (n - 1).
        for row in siblings:
            assert row["advantage"] == pytest.approx((row["score"] - mean) * 4 / 3, abs=1e-6)


def test_some_rows_are_kept_token_by_token(small_cast: SmallCast, tmp_path: Path):
    run = small_cast.run(small_config("telemetry.samples_per_iteration=5"))
    run.samples_folder = tmp_path
    run.iterate()
    detailed = [row for row in read_samples_of(sample_files(tmp_path)[0]) if row["tokens"] is not None]
    assert len(detailed) == 5
    for row in detailed:
        assert "".join(row["tokens"]) == row["response"]
        assert len(row["tokens"]) == len(row["token_log_probs"]) == len(row["token_advantages"]) == 6
        assert all(log_prob < 0 for log_prob in row["token_log_probs"])


def test_a_few_small_samples_go_through_the_flow_process(small_cast: SmallCast, tmp_path: Path):
    run = small_cast.run(small_config("telemetry.samples_per_iteration=3"))
    run.samples_folder = tmp_path
    run.iterate()
    shown = run.facts["samples"]["samples"]
    assert len(shown) == 3
    assert all(set(one) == {"prompt", "response", "score"} for one in shown)
    assert sum(len(one["prompt"]) + len(one["response"]) for one in shown) <= SHOWN_CHARACTERS


def test_shown_rows_go_from_the_worst_to_the_best():
    assert spread([0.1, 0.9, 0.5, 0.0, 0.7], 3) == [3, 2, 1]
    assert spread([0.1, float("nan")], 5) == [1, 0]
    assert spread([0.1, 0.2], 1) == [0]


def test_files_of_iterations_that_are_taken_back_go(tmp_path: Path):
    for number in (0, 1, 2):
        (tmp_path / f"iteration-{number:06d}.parquet").touch()
    cut_samples(tmp_path, 1)
    assert list(sample_files(tmp_path)) == [0]
    cut_samples(tmp_path / "absent", 0)
