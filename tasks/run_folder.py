"""The folder of a run, new or to be resumed, with the config that counts."""

from pathlib import Path

from configs.load import dump_config, load_config
from configs.run import RunConfig
from resources.run_directory import RunDirectory


def open_directory(config: RunConfig, resume: Path | None) -> tuple[RunConfig, RunDirectory]:
    """A new run folder for `config`, or the folder of the run to resume with the config stored there.

    Raises RunDirectoryError when a new run's folder exists, a resumed one's does not, or another process holds it, and
    ConfigError when the stored config cannot be read.
    """
    if resume is None:
        directory = RunDirectory.create(Path(config.run_dir).absolute(), config.name)
        directory.write_config(dump_config(config))
        return config, directory
    directory = RunDirectory.open(resume.absolute())
    stored = load_config(directory.path / "config.yaml")
    directory.acquire()
    return stored, directory
