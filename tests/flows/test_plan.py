"""`callsheet plan` as a person and as a program call it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from configs.load import load_config, preset_names
from flows.cli import main
from resources.node_resources import parse_nodes
from resources.plan import build_plan
from tests.resources.telemetry.scenarios import iteration, run_record, write_run

ROOT = Path(__file__).parents[2]
NODES = "2x(gpu=8,cpu=96,mem=900GiB,type=H100)"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_fits_its_machine(name: str, capsys: pytest.CaptureFixture[str]):
    is_cpu = all(pool.accelerator == "none" for pool in load_config(name).pools.values())
    code, out, _ = run(capsys, "plan", name, "--json", *([] if is_cpu else ["--nodes", NODES]))
    sheet = json.loads(out)
    assert (code, sheet["fits"], sheet["refusals"]) == (0, True, [])
    assert sheet["pins"]
    assert all(rank["env"]["RANK"] == str(rank["rank"]) for rank in sheet["ranks"])


@pytest.mark.parametrize("hybrid", ["actor_rollout", "actor_rollout_reference"])
def test_a_hybrid_role_is_planned_as_its_duties(hybrid: str, capsys: pytest.CaptureFixture[str]):
    changes = [f"roles={{{hybrid}: {{pool: main}}, reward: {{pool: main}}}}", "algorithm.kl.coef=0"]
    code, out, error = run(capsys, "plan", "quickstart-grpo", *(part for one in changes for part in ("--set", one)))
    assert (code, error) == (0, "")
    assert f"{hybrid}, rank 0 of " in out


def test_planning_every_preset_imports_neither_torch_nor_ray():
    code = (
        "import sys, contextlib, io; from flows.cli import main; from configs.load import preset_names\n"
        f"nodes = ['--nodes', {NODES!r}]\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    codes = [main(['plan', name, *more]) for name in preset_names() for more in (nodes, [*nodes, '--json'])]\n"
        "    main(['plan', 'quickstart'])\n"
        "heavy = {'torch', 'ray', 'prefect', 'vllm', 'transformers', 'tensordict', 'numpy'} & set(sys.modules)\n"
        "print(sum(codes), len(codes), sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == f"0 {2 * len(preset_names())} []", done.stderr


def test_the_sheet_shows_placement_environment_batch_and_memory(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "plan", "gsm8k-qwen2.5-1.5b-8gpu-split-pools", "--nodes", NODES)
    assert code == 0
    for part in (
        "Who works where",
        "Environment",
        "Other processes",
        "Nodes",
        "Batch of an iteration",
        "Memory of a rank",
    ):
        assert part in out
    assert "critic, rank 1 of 2" in out
    assert "It fits." in out


def test_what_does_not_fit_ends_with_2_and_the_table(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "plan", "gsm8k-qwen2.5-1.5b-2x8gpu", "--nodes", "(gpu=16,cpu=256)")
    assert code == 2
    assert "wants at least 2 distinct nodes and 1 can be used" in out
    assert "pool main of this run holds 64 CPU, 8 GPU" in out


def test_what_does_not_fit_is_told_to_programs_too(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "plan", "gsm8k-qwen2.5-0.5b-1gpu", "--nodes", "(cpu=64)", "--json")
    sheet = json.loads(out)
    assert (code, sheet["fits"], sheet["no_fit"]["pool"]) == (2, False, "main")
    assert sheet["no_fit"]["wanted"] == {"CPU": 8.0, "GPU": 1.0}


def test_a_knob_that_the_algorithm_does_not_read_is_told(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "plan", "quickstart-grpo", "--set", "algorithm.name=gspo", "--json")
    assert code == 0
    assert not any("does not read it" in remark for remark in json.loads(out)["remarks"])
    given = ("--set", "algorithm.clip_ratio_dual=3.0")
    _, out, _ = run(capsys, "plan", "quickstart-grpo", "--set", "algorithm.name=gspo", *given, "--json")
    assert "algorithm.clip_ratio_dual is set, and gspo does not read it" in json.loads(out)["remarks"]


def test_what_only_the_start_of_a_run_looks_at_is_named(capsys: pytest.CaptureFixture[str]):
    _, out, _ = run(capsys, "plan", "quickstart", "--json")
    assert not any("is looked at" in remark for remark in json.loads(out)["remarks"])
    settings = ("--set", "algorithm.loss=no_module:loss", "--set", "code.import_paths=[/nowhere]")
    code, out, _ = run(capsys, "plan", "quickstart", *settings, "--json")
    said = "what these keys name is looked at when a run starts, and was not here: algorithm.loss, code.import_paths"
    assert code == 0
    assert said in json.loads(out)["remarks"]


def test_a_model_whose_heads_no_engine_of_the_plan_takes_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    facts = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 8, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({**facts, "vocab_size": 128}))
    code, _, err = run(capsys, "plan", "quickstart", "--set", f"model={{path: {tmp_path}}}")
    assert code == 2
    assert "rollout.engine is 'vllm'; each attention head of model is 16 wide" in err


def test_a_space_too_small_for_an_iteration_ends_a_plan_with_2(capsys: pytest.CaptureFixture[str]):
    source = "data.sources=[{name: s, kind: sorting, options: {num_digits: 2}}]"
    code, _, err = run(capsys, "plan", "quickstart", "--set", source)
    assert code == 2
    assert "data.prompts_per_iteration is 512; data.sources have " in err


def test_a_plan_that_does_not_know_the_accelerators_memory_says_so(capsys: pytest.CaptureFixture[str]):
    name = "gsm8k-qwen2.5-1.5b-8gpu-colocated"
    code, out, _ = run(capsys, "plan", name, "--nodes", "1x(gpu=8,cpu=96,mem=900GiB)")
    told = " ".join(out.split())
    assert code == 0
    assert "The placement fits: the accelerator memory of main was not checked" in told
    assert "vram=80GiB" in told
    assert "It fits." not in told
    for known in ("vram=80GiB", "type=H100"):
        assert "It fits." in run(capsys, "plan", name, "--nodes", f"1x(gpu=8,cpu=96,mem=900GiB,{known})")[1]


def test_only_a_pool_of_cpus_is_told_of_a_cache_that_was_asked_for(capsys: pytest.CaptureFixture[str]):
    small = ("plan", "gsm8k-qwen2.5-1.5b-8gpu-split-pools", "--nodes", "(gpu=8,cpu=96,vram=8GiB)", "--json")
    refusals = json.loads(run(capsys, *small)[1])["refusals"]
    assert not any("KV cache" in said or "kv_cache_bytes" in said for said in refusals)
    asked = ("plan", "quickstart", "--nodes", "(cpu=8,mem=16GiB)", "--json", "--set", "rollout.kv_cache_bytes=17GiB")
    [said] = json.loads(run(capsys, *asked)[1])["refusals"]
    assert "and the KV cache that rollout.kv_cache_bytes asks for, take " in said


def test_a_damaged_model_folder_ends_a_plan_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "model.safetensors").write_bytes(b"x")
    shape = "num_layers: 1, hidden_size: 32, intermediate_size: 8, num_heads: 1, vocab_size: 128"
    code, _, err = run(capsys, "plan", "quickstart", "--set", f"model={{path: {tmp_path}, shape: {{{shape}}}}}")
    assert code == 2
    assert f"model: {tmp_path}/model.safetensors has 1 bytes" in err


def test_a_plan_needs_no_weights_and_says_that_training_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    shape = "num_layers: 1, hidden_size: 32, intermediate_size: 8, num_heads: 1, vocab_size: 128"
    wanted = ("plan", "quickstart", "--json", "--set", f"model={{path: {tmp_path}, shape: {{{shape}}}}}")
    code, out, _ = run(capsys, *wanted)
    assert code == 0
    said = json.loads(out)["absent_weights"]
    assert said.startswith(f"model.path is '{tmp_path}', which has no weights")
    assert said.endswith("a plan needs none, training refuses it")
    last = " ".join(run(capsys, *(part for part in wanted if part != "--json"))[1].split()).rpartition("It fits.")
    assert last[0] == ""
    assert "The placement fits: " in last[2]
    assert "which has no weights" in last[2]
    (tmp_path / "model.bin").write_bytes(b"x")
    assert json.loads(run(capsys, *wanted)[1])["absent_weights"] is None


def model_folder(folder: Path, **more: int) -> str:
    """A config.json and something that may be weights."""
    facts = {
        "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 1,
        "vocab_size": 128, "max_position_embeddings": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**facts, **more}))
    (folder / "model.bin").write_bytes(b"x")
    return f"model.path={folder}"


def test_a_shape_that_the_models_own_config_contradicts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    given = ("--set", "model.build=null", "--set", model_folder(tmp_path), "--set")
    code, _, err = run(capsys, "plan", "quickstart", *given, "model.shape={num_layers: 12, hidden_size: 32, "
                       "intermediate_size: 64, num_heads: 1, vocab_size: 128}")  # fmt: skip
    assert code == 2
    assert f"model.shape.num_layers is 12; {tmp_path}/config.json says 2; leave model.shape out" in err
    assert "num_heads" not in err
    assert run(capsys, "plan", "quickstart", *given, "model.shape=null")[0] == 0


def test_rows_longer_than_a_local_models_positions_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    given = ("--set", "model.build=null", "--set", "model.shape=null", "--set", model_folder(tmp_path), "--set")
    code, _, err = run(capsys, "plan", "quickstart", *given, "data.max_prompt_length=100")
    assert code == 2
    assert "model.path: the model has 64 positions, and prompt + response take up to 108; lower " in err


def test_a_model_that_is_elsewhere_is_planned_by_its_shape(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "plan", "quickstart", "--set", "model.build=null", "--set", "model.path=/srv/model")
    assert code == 0
    assert "model.path is '/srv/model', which is not on this machine; a plan needs no weights" in " ".join(out.split())
    assert "It fits." not in out


def test_bundles_that_no_process_fills_are_told(capsys: pytest.CaptureFixture[str]):
    wanted = ("plan", "quickstart", "--json", "--nodes", "(cpu=16,mem=64GiB)", "--set", "pools.main.nodes=[4]")
    remarks = json.loads(run(capsys, *wanted)[1])["remarks"]
    [told] = [remark for remark in remarks if "processes on" in remark]
    assert told.startswith("pool main has 4 bundles and processes on 1 of them; see roles.actor.workers")
    assert not any(
        "processes on" in said for said in json.loads(run(capsys, "plan", "quickstart", "--json")[1])["remarks"]
    )


def test_state_larger_than_the_accelerator_does_not_fit(capsys: pytest.CaptureFixture[str]):
    small = "(gpu=8,cpu=96,vram=8GiB)"
    code, out, _ = run(capsys, "plan", "gsm8k-qwen2.5-1.5b-8gpu-split-pools", "--nodes", small, "--json")
    assert code == 2
    assert json.loads(out)["refusals"][0].startswith("pool training: weights, gradients and optimizer states")


def test_a_kv_cache_larger_than_the_memory_of_a_cpu_does_not_fit(capsys: pytest.CaptureFixture[str]):
    wanted = ("plan", "quickstart", "--nodes", "(cpu=8,mem=16GiB)", "--set")
    code, out, _ = run(capsys, *wanted, "rollout.kv_cache_bytes=17GiB")
    assert code == 2
    assert "a smaller rollout.kv_cache_bytes" in " ".join(out.split())
    assert run(capsys, *wanted, "rollout.kv_cache_bytes=1GiB")[0] == 0


def test_an_estimate_over_the_accelerator_is_a_remark_not_a_refusal():
    config = load_config("gsm8k-qwen2.5-1.5b-8gpu-split-pools")
    plan = build_plan(config, parse_nodes("(gpu=8,cpu=96,vram=16GiB)"))
    assert plan.does_fit
    assert any("take about" in remark for remark in plan.remarks)


def test_a_sheet_whose_estimate_is_over_does_not_end_with_it_fits(capsys: pytest.CaptureFixture[str]):
    wanted = ("plan", "quickstart", "--nodes")
    code, out, _ = run(capsys, *wanted, "(cpu=8,mem=1GiB)")
    assert code == 0
    assert "The placement fits: by estimate the memory of main does not suffice; see the notes" in " ".join(out.split())
    assert "It fits." not in out
    assert "It fits." in run(capsys, *wanted, "(cpu=8,mem=64GiB)")[1]


def test_a_cache_too_small_for_all_sequences_is_a_remark():
    config = load_config("gsm8k-qwen2.5-1.5b-8gpu-split-pools", ["rollout.gpu_memory_fraction=0.1"])
    plan = build_plan(config, parse_nodes(NODES))
    # 8 GiB less weights of 2.875 GiB leave 5.125 GiB; a sequence of 1,536 tokens x 28 KiB takes 42 MiB
    assert any("leaves room for 124 whole sequences and up to 256 run at once" in remark for remark in plan.remarks)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "quickstrt"], "did you mean quickstart?"),
        (["plan", "quickstart", "--set", "algorithm.kl_coeff=1"], "did you mean algorithm.kl.coef?"),
        (["plan", "quickstart", "--nodes", "2x(gpu=0)"], "--nodes holds gpu=0"),
        (["plan", "quickstart", "--nodes", "(cpu=4)", "--address", "h:1"], "give one of them"),
        (["plan", "quickstart", "--address", "127.0.0.1:1"], "nobody listens at 127.0.0.1:1"),
        (["plan", "quickstart", "--set", "model={path: some/model}"], "model.shape is missing"),
        (
            ["plan", "quickstart", "--set", "model={path: ./absent}"],
            "model.path is './absent'; there is no such folder",
        ),
        (["plan", "quickstart", "--set", "rollout.scripted.responses.mode=perfect"], "scripted.responses.mode is "),
    ],
)
def test_a_refusal_is_one_block_and_ends_with_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


def test_a_refusal_is_json_when_json_was_asked_for(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "plan", "quickstart", "--json", "--set", "seed=x")
    assert code == 2
    assert json.loads(out) == {
        "fits": False,
        "refusals": [
            "seed is 'x'; it must be an integer, and nothing is converted; numbers and true/false stand without quotes"
        ],
    }


@pytest.mark.parametrize("arguments", [["plan"], ["plan", "quickstart", "--nods", "x"], ["plann"]])
def test_a_wrong_command_line_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert err


@pytest.mark.slow
def test_a_running_cluster_is_asked_for_its_nodes(capsys: pytest.CaptureFixture[str]):
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 200_000_000})
    try:
        cluster.add_node(
            num_cpus=8, num_gpus=1, node_ip_address="127.0.0.10", object_store_memory=200_000_000, wait=True
        )
        arguments = ["plan", "gsm8k-qwen2.5-0.5b-1gpu", "--json", "--address", cluster.address]
        code, out, err = run(capsys, *arguments)
        sheet = json.loads(out)
        assert code == 0, err
        assert {rank["node_ip"] for rank in sheet["ranks"]} == {"127.0.0.10"}
        code, out, _ = run(capsys, *arguments, "--set", "pools.main.cpus_per_bundle=9")
        assert code == 2
        assert "no single node has 9 CPU, the largest has 8" in json.loads(out)["refusals"][0]
    finally:
        cluster.shutdown()


def test_with_a_past_run_the_plan_says_what_a_step_would_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """3 + 0.5 + 0.05 + 1.8 + 0.3 s on the critical path and six gaps of 10 ms; then with four times the rows."""
    run_dir = write_run(tmp_path, [iteration(number, 10.0 * number) for number in range(3)], run_record())
    changes = ("--set", "data.prompts_per_iteration=128")
    code, out, _ = run(capsys, "plan", "quickstart", *changes, "--json", "--run", str(run_dir))
    sheet = json.loads(out)
    assert code == 0
    assert sheet["measured_step_seconds"] == pytest.approx(5.71)
    assert sheet["unchanged_step_seconds"] == pytest.approx(2.71)  # no engine told of its decoding
    assert sheet["prediction"]["step_seconds"] > sheet["measured_step_seconds"]
    code, out, _ = run(capsys, "plan", "quickstart", "--run", str(run_dir))
    assert "main[1]: actor (fused), rollout (fused), reference (fused), critic (fused), reward, advantage" in out


def test_a_past_run_that_measured_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, _, err = run(capsys, "plan", "quickstart", "--run", str(tmp_path))
    assert code == 2
    assert "spans.jsonl does not exist" in err


def test_the_sheet_shows_servers_environments_teachers_and_judges(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    shape = (
        "{num_layers: 2, hidden_size: 64, intermediate_size: 128, num_heads: 2, vocab_size: 128, max_positions: 128}"
    )
    judge = f"{{name: judge, kind: judge, judge: {{serve: {{build: tiny, shape: {shape}}}}}}}"
    teachers = ", ".join(
        f"{{name: {name}, sources: [{name}], model: {{build: tiny, shape: {shape}}}}}" for name in ("sums", "products")
    )
    sources = ", ".join(f"{{name: {name}, kind: calculator, size: 600}}" for name in ("sums", "products"))
    overrides = (
        "roles.rollout={pool: engines, workers: 4, tensor_parallel: 2}", "rollout.servers.enabled=true",
        "roles.env={pool: worlds, workers: 3}", "roles.teacher={pool: teachers, colocate: split}",
        "pools={main: {nodes: [1]}, engines: {nodes: [4]}, worlds: {nodes: [3]}, teachers: {nodes: [2]}}",
        "rollout.tools={environment: 'my_project.games:Maze'}", f"data.sources=[{sources}]", f"teachers=[{teachers}]",
        "distillation={objective: reverse_kl_reward}", "algorithm.name=grpo", "roles.reward.cpus=0.5", "sft=null",
        f"reward.graders=[{{name: score, kind: rule, function: environment_score}}, {judge}]", "validation.sources=[]",
        "validation.every=0",
    )  # fmt: skip
    arguments = [word for override in overrides for word in ("--set", override)]
    code, out, err = run(capsys, "plan", "quickstart-tools", "--nodes", "1x(cpu=32,mem=64GiB)", "--json", *arguments)
    assert code == 0, err
    sheet = json.loads(out)
    ranks = [(rank["group"], rank["pool"], rank["bundle"]) for rank in sheet["ranks"]]
    for group, pool, bundles in (
        ("rollout.0", "engines", [0, 1]), ("rollout.1", "engines", [2, 3]), ("env", "worlds", [0, 1, 2]),
        ("teacher.sums", "teachers", [0]), ("teacher.products", "teachers", [1]),
    ):  # fmt: skip
        assert [place for name, where, place in ranks if (name, where) == (group, pool)] == bundles
    assert {"teacher", "reward"} <= set(sheet["memory"])  # the judge's model is the reward role's


# Two layers, keys and values, 128 numbers of 4 bytes each: 2048 bytes a token. Prompt and response: 8 + 8 tokens.
@pytest.mark.parametrize(("cache", "does_fit"), [("1", False), ("32767", False), ("32768", True), ("null", True)])
def test_a_cache_that_holds_no_whole_sequence_is_refused(cache: str, does_fit: bool):
    config = load_config("quickstart", [f"rollout.kv_cache_bytes={cache}"])
    plan = build_plan(config, parse_nodes("(cpu=8,mem=64GiB)"))
    assert plan.does_fit == does_fit
    said = f"rollout.kv_cache_bytes is {cache}; one sequence of 16 tokens takes 32768 bytes; raise it"
    assert any(said in refusal for refusal in plan.refusals) != does_fit


def test_an_engine_that_reads_no_cache_is_not_asked_for_one():
    scripted = ["rollout.engine=scripted", "rollout.scripted={}", "rollout.kv_cache_bytes=1"]
    assert build_plan(load_config("quickstart", scripted), parse_nodes("(cpu=8,mem=64GiB)")).does_fit
    given = ["rollout.num_gpu_blocks_override=16", "rollout.kv_cache_bytes=1"]
    assert build_plan(load_config("quickstart", given), parse_nodes("(cpu=8,mem=64GiB)")).does_fit


def test_an_accelerator_without_room_for_a_sequence_beside_the_weights_is_refused():
    config = load_config("gsm8k-qwen2.5-1.5b-8gpu-split-pools", ["rollout.gpu_memory_fraction=0.01"])
    plan = build_plan(config, parse_nodes("2x(gpu=8,cpu=96,mem=900GiB,type=H100)"))
    (refusal,) = plan.refusals
    assert refusal.startswith("rollout.gpu_memory_fraction is 0.01 of 80.00 GiB in pool ")
    assert "raise it, shorten sequences, or use tensor_parallel" in refusal


def test_peers_of_an_engine_share_weights_and_cache():
    changes = ["rollout.gpu_memory_fraction=0.1", "roles.rollout.tensor_parallel=2"]
    config = load_config("gsm8k-qwen2.5-1.5b-8gpu-split-pools", changes)
    plan = build_plan(config, parse_nodes("2x(gpu=8,cpu=96,mem=900GiB,type=H100)"))
    assert not any("leaves room for 124 whole" in remark for remark in plan.remarks), plan.remarks
