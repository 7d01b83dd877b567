"""Checkpoints: an interrupted save never counts, `latest` goes by number, retention never deletes the only good one."""

from pathlib import Path

import pytest

from configs.training import CheckpointConfig
from resources.checkpoints import CheckpointError, CheckpointStore, Manifest


def manifest(iteration: int, **more: object) -> Manifest:
    position = {"epoch": 0, "start": 0}
    fields = {"policy_version": iteration, "data_position": position, "kl_coef": 0.0, "metrics_bytes": 0}
    return Manifest(run_id="r", iteration=iteration, config_digest="d", **{**fields, **more})  # type: ignore[arg-type]


def save(store: CheckpointStore, iteration: int, **more: object) -> None:
    staging = store.begin(iteration)
    (staging / "actor").mkdir()
    (staging / "actor" / "rank-00000.safetensors").write_bytes(b"weights %d" % iteration)
    store.commit(staging, manifest(iteration, **more))


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def test_an_interrupted_save_is_not_a_checkpoint(store: CheckpointStore):
    save(store, 10)
    staging = store.begin(20)
    (staging / "half").write_bytes(b"half")
    latest, problems = store.latest()
    assert latest is not None
    assert latest.iteration == 10
    assert problems == [f"{staging.name}: a save that was cut off"]


def test_latest_goes_by_number_not_by_name(store: CheckpointStore):
    for iteration in (9000, 1_000_000, 200):
        save(store, iteration)
    latest, _ = store.latest()
    assert latest is not None
    assert latest.iteration == 1_000_000


@pytest.mark.parametrize(("keep", "left"), [(-1, [200, 9000, 10000]), (2, [9000, 10000]), (1, [10000])])
def test_retention_keeps_the_newest(store: CheckpointStore, keep: int, left: list[int]):
    for iteration in (9000, 10000, 200):
        save(store, iteration)
    store.prune(keep)
    assert store.iterations() == left


def test_keeping_none_is_refused(store: CheckpointStore):
    with pytest.raises(ValueError, match="keep is 0"):
        store.prune(0)


def test_retention_counts_checkpoints_of_the_process_before(store: CheckpointStore):
    for iteration in (10, 20, 30):
        save(store, iteration)
    again = CheckpointStore(store.folder)
    save(again, 40)
    again.prune(2)
    assert again.iterations() == [30, 40]


def test_a_damaged_file_is_noticed_and_the_older_checkpoint_is_taken(store: CheckpointStore):
    save(store, 1)
    save(store, 2)
    (store.path_of(2) / "actor" / "rank-00000.safetensors").write_bytes(b"weights X")
    latest, problems = store.latest()
    assert latest is not None
    assert latest.iteration == 1
    assert problems == ["iteration-000002: actor/rank-00000.safetensors does not match its checksum"]


@pytest.mark.parametrize(
    ("held", "newest"),
    [
        ("aa\nbb\ncc\n", 3),
        ("aa\nbb\ncc\ndd\n", 3),
        ("aa\nbb\nc", 1),
        ("aa\nbb\ncc", 1),
        ("aa\n", 1),
        ("a", None),
        (None, None),
    ],
)
def test_a_checkpoint_that_counts_lines_which_are_not_there_is_passed_over(
    store: CheckpointStore, tmp_path: Path, held: str | None, newest: int | None
):
    """Two lines more were written by iteration 3 than by iteration 1; going on from 3 would leave a gap."""
    save(store, 1, metrics_bytes=3)
    save(store, 3, metrics_bytes=9)
    metrics = tmp_path / "metrics.jsonl"
    if held is not None:
        metrics.write_text(held)
    found, problems = store.latest(metrics)
    assert (found.iteration if found is not None else None) == newest
    assert all("metrics.jsonl has" in problem for problem in problems)
    assert len(problems) == {3: 0, 1: 1, None: 2}[newest]


def test_a_line_that_was_edited_is_told_as_such_and_not_as_lines_that_lack(store: CheckpointStore, tmp_path: Path):
    save(store, 2, metrics_bytes=8)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("a\nbb\ncccc\n")  # It was "aaa" and "bbb".
    _, [problem] = store.latest(metrics)
    assert problem.endswith("metrics.jsonl was changed since: its first 8 bytes were 2 lines; put it back")


def test_the_only_whole_checkpoint_is_never_pruned(store: CheckpointStore):
    save(store, 1)
    save(store, 2)
    (store.path_of(2) / "actor" / "rank-00000.safetensors").unlink()
    store.prune(1)
    assert 1 in store.iterations()


def test_the_best_checkpoint_stays_beside_the_newest(store: CheckpointStore):
    for iteration, accuracy in ((1, 0.2), (2, 0.9), (3, 0.4), (4, 0.5)):
        save(store, iteration, metrics={"validation/accuracy": accuracy})
    best = store.best("validation/accuracy")
    assert best == 2
    store.prune(1, {best})
    assert store.iterations() == [2, 4]


def test_a_checkpoint_of_iteration_zero_is_a_checkpoint(store: CheckpointStore):
    save(store, 0)
    latest, _ = store.latest()
    assert latest is not None
    assert latest.iteration == 0


def test_an_unknown_format_is_refused(store: CheckpointStore):
    save(store, 1)
    path = store.path_of(1) / "manifest.json"
    path.write_text(path.read_text().replace('"format": 2', '"format": 99'))
    with pytest.raises(CheckpointError, match="format 99; this version reads 2"):
        store.read(1)


def test_a_folder_that_was_renamed_to_another_iteration_is_passed_over_and_told(store: CheckpointStore):
    save(store, 5)
    save(store, 10)
    store.path_of(10).rename(store.path_of(20))
    latest, problems = store.latest()
    assert latest is not None
    assert latest.iteration == 5
    assert problems == [
        "iteration-000020: its manifest.json is of iteration 10, and the folder's name says 20; "
        "give the folder its own name back"
    ]


def test_publishing_an_iteration_twice_keeps_the_first(store: CheckpointStore):
    save(store, 1)
    save(store, 1)
    assert store.iterations() == [1]
    assert not list(store.folder.glob(".writing-*"))


def test_a_save_takes_the_place_of_a_damaged_checkpoint_of_its_iteration(store: CheckpointStore):
    save(store, 40)
    save(store, 42)
    (store.path_of(42) / "actor" / "rank-00000.safetensors").write_bytes(b"weights X")
    save(store, 42)
    assert (store.path_of(42) / "actor" / "rank-00000.safetensors").read_bytes() == b"weights 42"
    store.prune(1, newest=42)
    assert store.newest().iteration == 42
    assert not list(store.folder.glob(".writing-*"))


def test_a_save_takes_the_place_of_one_that_counts_lines_which_are_gone(store: CheckpointStore, tmp_path: Path):
    save(store, 2, metrics_bytes=9)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("a\nb\n")
    save(store, 2, metrics_bytes=4)
    found, problems = store.latest(metrics)
    assert found is not None
    assert (found.metrics_bytes, problems) == (4, [])


@pytest.mark.parametrize(
    ("iterations", "every", "saved"),
    [(237, 50, [50, 100, 150, 200, 237]), (100, 50, [50, 100]), (8, 0, [8]), (3, 5, [3])],
)
def test_a_run_saves_on_its_grid_and_once_at_its_end(iterations: int, every: int, saved: list[int]):
    config = CheckpointConfig(every=every)
    assert [done for done in range(1, iterations + 1) if config.is_due(done, iterations)] == saved


def test_a_metric_that_is_no_number_is_not_the_best(store: CheckpointStore):
    for iteration, accuracy in ((1, 0.2), (2, float("nan")), (3, float("inf"))):
        save(store, iteration, metrics={"validation/accuracy": accuracy})
    assert store.best("validation/accuracy") == 1


def test_a_save_takes_the_place_of_a_whole_checkpoint_that_was_passed_over(store: CheckpointStore, tmp_path: Path):
    """It counts a line that is gone, and the new one happens to count as many bytes."""
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("")
    save(store, 6, metrics_bytes=7)
    assert store.latest(metrics)[0] is None
    staging = store.begin(6)
    (staging / "weights").write_bytes(b"new")
    final = store.commit(staging, manifest(6, metrics_bytes=7))
    assert (final / "weights").read_bytes() == b"new"
