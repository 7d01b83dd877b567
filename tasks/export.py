"""From a checkpoint to a Hugging Face folder, in this process: no cluster is needed, whatever the sharding was."""

from pathlib import Path

from configs.model import ModelConfig
from configs.run import RunConfig


def start_model(config: RunConfig, run: Path) -> ModelConfig:
    """The model that PPO started from: what the warm-up published in the run's folder, else the config's.

    What lies there in a run that has no warm-up is no start of it.
    """
    warmed = run / "model"
    if config.sft is None or not config.sft.warms_up or not (warmed / "config.json").exists():
        return config.model
    own = config.model.model_dump()
    moved = {"path": str(warmed), "build": None, "gguf_file": None, "tokenizer_path": None}
    return ModelConfig.model_validate({**own, **moved})


def export_checkpoint(
    config: RunConfig, run: Path, checkpoint: Path, folder: Path, *, as_adapter: bool = False
) -> None:
    """Write the policy in `checkpoint` as a folder that transformers and vLLM load; `as_adapter` as one for peft.

    Raises TensorFileError, and ValueError for the adapter of a run without `model.lora`.
    """
    from resources.models.causal_lm import prepare_model_folder  # the controller imports this file and loads no model
    from resources.workers.actor import ActorWorker

    model = start_model(config, run)
    actor = ActorWorker(model, config.actor, config.seed)
    actor.load_checkpoint(str(checkpoint))
    folder.parent.mkdir(parents=True, exist_ok=True)
    if as_adapter:
        actor.export_adapter(str(folder), str(prepare_model_folder(model, config.seed)))
    else:
        actor.export(str(folder))
