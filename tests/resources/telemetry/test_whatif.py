"""The simulator against cases whose answer is known, and measuring back what was put in."""

from dataclasses import replace
from pathlib import Path

import pytest

from resources.telemetry.profile import RolloutProfile, RunProfile, TaskProfile, measure_profile
from resources.telemetry.reader import SpanReader
from resources.telemetry.report import profile_of_run, search_layout
from resources.telemetry.search import fits_memory, search_topology
from resources.telemetry.simulation import Job, simulate
from resources.telemetry.spans import PoolRecord, RankSpan
from resources.telemetry.study import WORKLOADS, table
from resources.telemetry.text_report import render_prediction
from resources.telemetry.topology import Topology, measured_topology, override_topology, with_ranks
from resources.telemetry.whatif import predict, predict_unchanged
from tests.resources.telemetry.scenarios import ROLES, SECONDS, UPSTREAM, grader_facts, iteration, run_record, write_run

POOLS = dict.fromkeys(sorted(set(ROLES.values())), 1)


def profile(*, lengths: tuple[int, ...] = (100,), step_seconds: float = 0.03, **changes: object) -> RunProfile:
    """Every role on its own pool of one rank; the rollout decodes 100 tokens at 30 ms a step: 3 s. No overhead."""
    tasks = {
        name: TaskProfile(task=name, role=ROLES[name], upstream=UPSTREAM.get(name, ()), num_ranks=1, seconds=(seconds,))
        for name, seconds in SECONDS.items()
    }
    rollout = RolloutProfile(
        num_engines=1, step_seconds=step_seconds, token_seconds=0.0, overhead_seconds=0.0, slots=64,
        length_edges=(*lengths, lengths[-1]), length_weights=tuple(1 / len(lengths) for _ in lengths),
    )  # fmt: skip
    made = RunProfile(
        tasks=tasks,
        rollout=rollout,
        grader=None,
        pools=POOLS,
        accelerator_pools=frozenset(),
        roles={role: role for role in POOLS},
        colocate={},
        cores=0.0,
        prompts_per_iteration=8,
        group_size=4,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


# rollout, the siblings side by side, advantage, the updates side by side, sync
SPLIT = 3.0 + 0.5 + 0.05 + 1.8 + 0.3
# all in a row
FUSED = sum(SECONDS.values())


def fused(base: Topology, ranks: int = 1) -> Topology:
    roles = dict.fromkeys(base.roles, "main")
    return replace(base, pools={"main": ranks}, roles=roles, colocate=dict.fromkeys(roles, "fused"))


def test_the_measured_layout_is_predicted_as_measured():
    made = profile()
    assert predict(made, measured_topology(made)).step_seconds == pytest.approx(SPLIT)


def test_fused_roles_work_one_after_the_other():
    made = profile()
    prediction = predict(made, fused(measured_topology(made)))
    assert prediction.step_seconds == pytest.approx(FUSED)
    assert prediction.bottleneck == "rollout"
    assert sum(prediction.busy_seconds.values()) == pytest.approx(FUSED)


def test_a_role_that_only_sleeps_is_twice_as_fast_on_two_ranks():
    made = profile()
    faster = predict(made, with_ranks(measured_topology(made), actor=2))
    # log-probs from 0.5 to 0.25 hide behind reference and values; the update drops to the critic's 1.6
    assert faster.step_seconds == pytest.approx(SPLIT - 0.2)


def test_two_ranks_on_cores_that_one_rank_fills_are_no_faster():
    made = profile()
    busy = {
        name: replace(task, cores_per_rank=2.0 if task.role == "actor" else 0.0) for name, task in made.tasks.items()
    }
    made = replace(made, tasks=busy, cores=2.0)
    base = measured_topology(made)
    assert predict(made, with_ranks(base, actor=2)).step_seconds == pytest.approx(SPLIT)
    assert predict(made, replace(with_ranks(base, actor=2), cores=4.0)).step_seconds == pytest.approx(SPLIT - 0.2)


def test_siblings_that_want_the_same_core_take_turns_in_effect():
    two = [Job("a", (), 0.0, 2.0, cores=1.0), Job("b", (), 0.0, 1.0, cores=1.0)]
    assert [outcome.end for outcome in simulate(two, cores=1.0)] == [3.0, 2.0]
    assert [outcome.end for outcome in simulate(two, cores=2.0)] == [2.0, 1.0]


def test_jobs_on_one_accelerator_pool_share_it_and_a_lock_is_held_by_one():
    shared = [Job("a", (), 0.0, 2.0, accelerator="p"), Job("b", (), 0.0, 1.0, accelerator="p")]
    assert [outcome.end for outcome in simulate(shared)] == [3.0, 2.0]
    locked = [Job("a", (), 0.0, 2.0, locks=("p",)), Job("b", (), 0.5, 1.0, locks=("p",))]
    assert [(outcome.start, outcome.end) for outcome in simulate(locked)] == [(0.0, 2.0), (2.0, 3.0)]


def test_a_ring_of_jobs_is_refused():
    with pytest.raises(ValueError, match="wait for each other"):
        simulate([Job("a", (1,), 0.0, 1.0), Job("b", (0,), 0.0, 1.0)])


def test_four_times_the_group_costs_four_times_the_training_and_the_same_decode_steps():
    made = profile()
    larger = predict(made, replace(measured_topology(made), group_size=16, max_running_sequences=128))
    assert larger.step_seconds == pytest.approx(3.0 + 4 * 0.5 + 4 * 0.05 + 4 * 1.8 + 0.3)


def test_half_the_slots_decode_in_two_waves():
    made = profile()
    assert predict(made, replace(measured_topology(made), max_running_sequences=16)).step_seconds == pytest.approx(
        SPLIT + 3.0
    )


def test_two_engines_halve_the_tokens_of_each_but_not_the_longest_response():
    made = profile()
    assert made.rollout is not None
    per_token = replace(made, rollout=replace(made.rollout, step_seconds=0.0, token_seconds=3.0 / (32 * 100)))
    base = measured_topology(made)
    assert predict(made, with_ranks(base, rollout=2)).step_seconds == pytest.approx(SPLIT)
    assert predict(per_token, with_ranks(base, rollout=2)).step_seconds == pytest.approx(SPLIT - 1.5)


def test_async_depth_one_overlaps_rollout_and_training_but_for_the_sync():
    made = profile()
    prediction = predict(made, replace(measured_topology(made), async_depth=1))
    assert prediction.step_seconds == pytest.approx(3.0 + 0.3)  # training's 2.35 s hide behind the rollout
    slow = profile(step_seconds=0.01)
    prediction = predict(slow, replace(measured_topology(slow), async_depth=1))
    assert prediction.step_seconds == pytest.approx(0.5 + 0.05 + 1.8 + 0.3)


def test_ranks_beyond_the_rows_do_nothing():
    made = profile()
    base = measured_topology(made)
    assert predict(made, with_ranks(base, critic=32, actor=32)).step_seconds == pytest.approx(
        predict(made, with_ranks(base, critic=500, actor=500)).step_seconds
    )


def test_three_ranks_for_32_rows_wait_for_the_one_with_eleven():
    made = profile()
    prediction = predict(made, with_ranks(measured_topology(made), actor=3, critic=32, reference=32, reward=32))
    assert prediction.step_seconds == pytest.approx(3.0 + 0.5 * 11 / 32 + 0.05 + 1.8 * 11 / 32 + 0.3)


def test_fixed_seconds_do_not_shrink_with_ranks_and_collectives_grow():
    task = TaskProfile(
        task="x", role="actor", upstream=(), num_ranks=2, seconds=(4.0,), fixed_seconds=1.0, communication_seconds=0.5
    )
    made = replace(profile(), tasks={"x": task}, rollout=None, roles={"actor": "p"}, pools={"p": 2})
    base = measured_topology(made)
    assert predict(made, base).step_seconds == pytest.approx(4.5)
    # 1 + 3 * 2 / 4 + 0.5 * (3/4) / (1/2) * 1.25
    assert predict(made, with_ranks(base, p=4)).step_seconds == pytest.approx(1.0 + 1.5 + 0.9375)
    assert predict(made, with_ranks(base, p=1)).step_seconds == pytest.approx(1.0 + 6.0)


def test_collectives_shrink_with_the_micro_batches_of_a_rank():
    task = TaskProfile(
        task="x", role="actor", upstream=(), num_ranks=2, seconds=(4.0,), communication_seconds=0.5, micro_batches=8.0
    )
    made = replace(profile(), tasks={"x": task}, rollout=None, roles={"actor": "p"}, pools={"p": 2})
    # half the work and half the micro-batches; a ring of 4 and one doubling
    expected = 2.0 + 0.5 * 1.5 * 1.25 / 2
    assert predict(made, with_ranks(measured_topology(made), p=4)).step_seconds == pytest.approx(expected)


def test_a_role_without_a_pool_is_refused():
    made = profile()
    base = measured_topology(made)
    with pytest.raises(ValueError, match=r"roles \['critic'\] have no pool"):
        predict(made, replace(base, roles={role: pool for role, pool in base.roles.items() if role != "critic"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pools": {"a": 0}}, "pool 'a' has 0 ranks"),
        ({"roles": {"actor": "b"}}, r"roles name pools \['b'\]"),
        ({"group_size": 0}, "group_size is 0"),
        ({"async_depth": -1}, "async_depth is -1"),
        ({"colocate": {"actor": "stacked"}}, "colocate has"),
        (
            {"roles": {"rollout": "a"}, "tensor_parallel": 2},
            "tensor_parallel is 2; the rollout has 1 ranks",
        ),
    ],
)
def test_a_layout_that_cannot_be_is_refused(changes: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        Topology(**{"pools": {"a": 1}, "roles": {"actor": "a"}, **changes})  # type: ignore[arg-type]


def test_changes_come_in_the_words_of_the_config():
    base = measured_topology(profile())
    changed = override_topology(
        base,
        {
            "rollout.group_size": "16",
            "roles.critic.pool": "actor",
            "roles.critic.colocate": "fused",
            "async_depth": "1",
            "pools.rollout.bundles": "2",
        },
    )
    assert (changed.group_size, changed.roles["critic"], changed.async_depth, changed.pools["rollout"]) == (
        16,
        "actor",
        1,
        2,
    )
    assert "critic" not in changed.pools
    with pytest.raises(ValueError, match=r"'actor\.lr' is nothing a what-if can change"):
        override_topology(base, {"actor.lr": "1"})
    with pytest.raises(ValueError, match=r"async_depth is two; it is a whole number"):
        override_topology(base, {"async_depth": "two"})


def test_the_search_gives_most_ranks_to_the_role_with_most_work():
    made = replace(profile(), accelerator_pools=frozenset({"actor", "critic", "reference", "rollout"}))
    assert made.rollout is not None
    made = replace(made, rollout=replace(made.rollout, step_seconds=0.0, token_seconds=12.0 / 3200))
    result = search_topology(made, 8)
    assert result.is_complete
    assert result.best.step_seconds <= min(found.step_seconds for found in result.alternatives)
    # fused on 8 is what a perfect split could at most reach here: all roles scale, so all ranks for each in turn
    everything = sum(seconds for name, seconds in SECONDS.items() if ROLES[name] in ("actor", "critic", "reference"))
    assert result.best.step_seconds <= 12.0 / 8 + (everything - 0.3) / 8 + 0.05 + 0.3 + 1e-6


def test_the_search_splits_when_a_role_does_not_scale():
    """Critic and actor update cannot use a second rank: side by side they take 1.8 s, in a row 3.4 s."""
    made = replace(profile(), accelerator_pools=frozenset({"actor", "critic", "reference", "rollout"}))
    stiff = {name: replace(task, fixed_seconds=task.mean_seconds) for name, task in made.tasks.items()}
    best = search_topology(replace(made, tasks=stiff), 4).best
    assert best.step_seconds == pytest.approx(SPLIT)
    assert best.topology.roles["critic"] != best.topology.roles["actor"]


def test_the_search_lets_no_rollout_run_ahead_in_the_actors_process():
    made = replace(profile(), accelerator_pools=frozenset({"actor", "critic", "reference", "rollout"}))
    found = search_topology(made, 4, max_async_depth=1).alternatives
    ahead = [one.topology for one in found if one.topology.async_depth]
    assert ahead
    assert not any(layout.is_fused_with("actor", "rollout") for layout in ahead)


def test_a_rollout_ahead_in_the_actors_process_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"async_depth is 1, and actor and rollout are one process.*pool of its own"):
        override_topology(fused(measured_topology(profile())), {"async_depth": "1"})


def test_a_prediction_is_compared_with_the_one_for_the_layout_as_it_was():
    made = profile(measured_step_seconds=8.0)
    unchanged = predict_unchanged(made)
    assert unchanged == pytest.approx(SPLIT)
    same = render_prediction(predict(made, measured_topology(made)), unchanged, made.measured_step_seconds)
    assert f"step 5.650 s (+0 % against {SPLIT:.3f} s predicted for the layout as it was; measured 8.000 s)" in same
    faster = predict(made, with_ranks(measured_topology(made), actor=2))
    assert "step 5.450 s (-4 % against 5.650 s" in render_prediction(faster, unchanged, 8.0)
    assert "\nnote: a rule [of a list]\n" in render_prediction(faster, unchanged, 8.0, ["a rule [of a list]"])


def test_the_search_keeps_what_does_not_fit_apart():
    made = replace(
        profile(), accelerator_pools=frozenset({"actor", "critic", "reference", "rollout"}), accelerator_bytes=80e9
    )
    heavy = {
        name: replace(task, memory_bytes=50e9 if task.role == "rollout" else 60e9) for name, task in made.tasks.items()
    }
    made = replace(made, tasks=heavy)
    best = search_topology(made, 4).best
    assert fits_memory(made, best.topology)
    with pytest.raises(ValueError, match=r"no layout of .* fits on 1 accelerators"):
        search_topology(made, 1)


def gauged(begin: float, end: float) -> list[RankSpan]:
    facts = {
        "rows": 32,
        "slots": 32,
        "response_length_max": 100,
        "response_length_mean": 100.0,
        "tokens": 3200,
        "response_length_p50": 100.0,
        "response_length_histogram": {"100": 32},
        "decode_step_seconds": 0.03,
        "decode_token_seconds": 0.0,
    }
    return [RankSpan(rank=0, start=begin, end=end, facts=facts)]


def test_a_runs_spans_give_back_its_own_step(tmp_path: Path):
    made, now = [], 0.0
    for number in range(4):
        made.append(iteration(number, now, ranks={"rollout": gauged}))
        now = made[-1][1].ended
    write_run(tmp_path, made, run_record())
    measured = profile_of_run(tmp_path)
    assert measured.rollout is not None
    assert measured.rollout.step_seconds == pytest.approx(0.03)
    prediction = predict(measured, measured_topology(measured))
    assert prediction.step_seconds == pytest.approx(measured.measured_step_seconds, rel=1e-3)
    assert any("CPU seconds" in note for note in prediction.assumptions)


def test_a_rollout_in_waves_gives_back_its_own_step(tmp_path: Path):
    """64 rows of 4 or 16 tokens in 16 slots: 40 steps full, and the last wave's tail of about seven."""

    def engine(begin: float, end: float) -> list[RankSpan]:
        facts = {
            "rows": 64, "slots": 16, "response_length_max": 16, "response_length_mean": 10.0, "tokens": 640,
            "response_length_histogram": {"4": 32, "16": 32}, "decode_steps": 47,
            "decode_step_seconds": 0.06, "decode_token_seconds": 0.0,
        }  # fmt: skip
        return [RankSpan(rank=0, start=begin, end=end, facts=facts)]

    runs = [iteration(n, 10.0 * n, seconds={"rollout": 47 * 0.06}, ranks={"rollout": engine}) for n in range(3)]
    record = run_record(prompts_per_iteration=16, group_size=4, max_running_sequences=16)
    measured = measure_profile(SpanReader(path=write_run(tmp_path, runs, record)).iterations(), record)
    assert measured.rollout is not None
    assert measured.rollout.overhead_seconds == pytest.approx(0.0, abs=1e-9)
    predicted = predict(measured, measured_topology(measured)).step_seconds
    assert predicted == pytest.approx(measured.measured_step_seconds, rel=0.05)


def test_graders_that_overlapped_beyond_their_processes_do_so_again(tmp_path: Path):
    """32 calls of 1 s in 2 s, though only two processes were configured: the step is predicted as it was."""
    facts = grader_facts([1.0] * 32, workers=2)
    runs = [
        iteration(n, 10.0 * n, seconds={"reward": 2.0}, facts={"reward": facts}, ranks={"rollout": gauged})
        for n in range(3)
    ]
    reader = SpanReader(path=write_run(tmp_path, runs, run_record()))
    measured = measure_profile(reader.iterations(), run_record())
    assert measured.grader is not None
    assert measured.grader.workers == 16
    predicted = predict(measured, measured_topology(measured)).step_seconds
    assert predicted == pytest.approx(measured.measured_step_seconds, rel=0.02)


def test_a_search_over_a_run_directory_reports_alternatives(tmp_path: Path):
    write_run(
        tmp_path,
        [iteration(0, ranks={"rollout": gauged})],
        run_record(pools={role: PoolRecord(ranks=1, accelerator="gpu") for role in POOLS}),
    )
    result = search_layout(tmp_path, 6)
    assert result.num_tried > 10
    assert sum(ranks for name, ranks in result.best.topology.pools.items() if name != "cpu") == 6


def test_a_run_without_a_whole_iteration_cannot_be_asked(tmp_path: Path):
    write_run(tmp_path, [(iteration(0)[0], None)], run_record())
    with pytest.raises(ValueError, match="no iteration of this run is complete"):
        profile_of_run(tmp_path)


def study_table() -> list[str]:
    text = (Path(__file__).parents[3] / "docs" / "colocate-or-split.md").read_text()
    return text.split("<!-- study -->")[1].split("<!-- /study -->")[0].strip().splitlines()


def test_two_rows_of_the_study_in_the_docs_are_what_the_simulator_says():
    rows = study_table()
    for index in (0, 6):
        assert table(WORKLOADS[index : index + 1]).splitlines()[2] == rows[index + 2]


@pytest.mark.slow
def test_the_whole_study_in_the_docs_is_what_the_simulator_says():
    assert table().splitlines() == study_table()
