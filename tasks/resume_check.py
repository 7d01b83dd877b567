"""What a run that is gone on with is refused for: the config in its folder may have been edited since."""

from collections.abc import Iterator
from pathlib import Path

from configs.load import config_digest, load_config
from configs.problems import ConfigError, Problem
from configs.run import RunConfig
from resources.checkpoints import CheckpointStore, Manifest
from resources.run_directory import RunDirectory
from tasks.graders_of import check_graders
from tasks.start_check import check_start


def check_resume(folder: Path) -> None:
    """Raises ConfigError with every problem of the config stored in `folder`, RunDirectoryError where no run lies.

    What the newest checkpoint was made with could begin once; of that only keys may be gone since.
    """
    directory = RunDirectory.open(folder)
    config = load_config(directory.config_file)
    newest = CheckpointStore(directory.checkpoints).newest_manifest()
    if newest is not None and newest.config_digest == config_digest(config):
        check_graders(config)
        return
    problems = list(_absent_state(config, newest)) if newest is not None else []
    try:
        check_start(config)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(config.name, problems)


def _absent_state(config: RunConfig, manifest: Manifest) -> Iterator[Problem]:
    """Roles that by the config are saved, and whose state the checkpoint does not hold."""
    algorithm = config.algorithm
    saved: dict[str, tuple[str, object]] = {}
    if algorithm.needs_critic:
        saved["critic"] = ("algorithm.name", algorithm.name)
    if algorithm.kl.refresh_every is not None:
        saved["reference"] = ("algorithm.kl.refresh_every", algorithm.kl.refresh_every)
    held = {name.partition("/")[0] for name in manifest.checksums}
    for duty, (path, value) in saved.items():
        if duty not in held:
            rule = f"so the {duty} is saved with the run, and the checkpoint of iteration {manifest.iteration} has none"
            way_out = "set it back, or begin a new run with an export of this one (callsheet export) as model.path"
            yield Problem(path, value, rule, way_out)
