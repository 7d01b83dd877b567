"""Nothing that is read can run code: checkpoints, models, chat templates, configs; and the source reads no pickle."""

import ast
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import torch
import yaml
from jinja2.exceptions import SecurityError

from configs.load import load_config
from configs.model import ModelConfig, ModelShape
from configs.problems import ConfigError
from resources.checkpoints import CheckpointError, CheckpointStore
from resources.models.causal_lm import build_causal_lm, load_tokenizer, prepare_model_folder
from resources.tensor_files import load_tensors, save_tensors
from tasks.rewards.math_answer import math_answer

ROOT = Path(__file__).parents[2]
ROOMS = ("flows", "tasks", "resources", "configs")
UNPICKLERS = {"load", "loads", "Unpickler"}
PICKLE_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "_pickle"}
BETWEEN_OUR_PROCESSES = {"tasks/call.py": "cloudpickle.loads"}
"""A call and its outcome, over Ray's authenticated channel; never a file, never from a user."""
TINY = ModelConfig(
    build="tiny",
    shape=ModelShape(num_layers=1, hidden_size=16, intermediate_size=32, num_heads=2, vocab_size=128, max_positions=32),
)


class Bomb:
    """Pickled, it makes a file when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (os.mkdir, (str(self.mark),))


def calls_in(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    named = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [
        f"{func.value.id}.{func.attr}"
        for func in named
        if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name)
    ]


def test_the_source_loads_no_pickle():
    found = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            for call in calls_in(path):
                module, _, function = call.partition(".")
                is_pickle = module in PICKLE_MODULES and function in UNPICKLERS
                if (is_pickle or call in ("torch.load", "np.load", "numpy.load", "dcp.load")) and (
                    BETWEEN_OUR_PROCESSES.get(name) != call
                ):
                    found[name] = call
            if "FileSystemReader" in path.read_text() or "allow_pickle=True" in path.read_text():
                found[name] = "a reader that unpickles"
    assert found == {}


def test_a_pickle_in_place_of_a_checkpoint_file_is_refused(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    folder = store.path_of(1)
    save_tensors(folder / "actor", 0, {"w": torch.zeros(3)}, {})
    (folder / "actor" / "rank-00000.safetensors").write_bytes(pickle.dumps(Bomb(tmp_path / "mark")))
    (folder / "manifest.json").write_bytes(pickle.dumps(Bomb(tmp_path / "mark")))
    with pytest.raises(CheckpointError, match="manifest"):
        store.read(1)
    with pytest.raises(Exception, match=r"[Hh]eader"):  # safetensors' own error class
        load_tensors(folder / "actor", {"w": torch.zeros(3)}, 0)
    assert not (tmp_path / "mark").exists()


def test_pickled_weights_of_a_model_run_no_code(tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(prepare_model_folder(TINY, 0), folder)
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "mark"), protocol=2))
    with pytest.raises((pickle.UnpicklingError, OSError, ValueError, RuntimeError)):  # torch's weights_only reader
        build_causal_lm(ModelConfig(path=str(folder)), 0)
    assert not (tmp_path / "mark").exists()


def test_code_beside_a_model_is_never_run(tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(prepare_model_folder(TINY, 0), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'mark')!r})\n")
    with pytest.raises((ValueError, ImportError)):
        build_causal_lm(ModelConfig(path=str(folder)), 0)
    assert not (tmp_path / "mark").exists()


def test_a_chat_template_is_held_in_its_sandbox():
    tokenizer = load_tokenizer(TINY)
    tokenizer.chat_template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(SecurityError):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)


def test_a_row_and_a_response_that_hold_code_run_none(tmp_path: Path):
    call = f"__import__('os').mkdir('{tmp_path / 'mark'}')"
    texts = [call, f"\\boxed{{{call}}}", f"${call}$", f"1+{call}", f"\\boxed{{\\text{{{call}}}}}", f"{{{{ {call} }}}}"]
    for answer in (*texts, "1"):
        for response in texts:
            math_answer("", response, answer, {})
    tokenizer = load_tokenizer(TINY)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    for text in texts:  # a row is an argument of the template, never a part of it
        assert tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False) == text
    assert not (tmp_path / "mark").exists()


def test_a_config_with_a_python_tag_is_refused(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text(f"name: x\nmodel: !!python/object/apply:os.mkdir ['{tmp_path / 'mark'}']\n")
    with pytest.raises((ConfigError, yaml.YAMLError)):
        load_config(str(path), ())
    assert not (tmp_path / "mark").exists()


@pytest.mark.slow
def test_nobody_joins_the_cluster_without_its_token(cluster, tmp_path: Path):
    address = ray.get_runtime_context().gcs_address
    script = f"import ray; ray.init(address={address!r}, logging_level='ERROR'); print(ray.cluster_resources())"
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "HOME": str(tmp_path), "RAY_AUTH_TOKEN": ""}
    found = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert found.returncode != 0
    assert "CPU" not in found.stdout
    assert "auth" in found.stderr.lower()
