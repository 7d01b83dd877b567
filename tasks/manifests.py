"""What a checkpoint says of the run it was taken from, beside its tensors."""

from collections.abc import Mapping

from prefect.logging import get_logger

from configs.load import config_digest
from configs.run import RunConfig
from resources.checkpoints import Manifest
from resources.run_directory import RunDirectory
from tasks.session import Session


def tell_other_config(directory: RunDirectory, config: RunConfig, manifest: Manifest) -> None:
    """An event and a warning where a run goes on under another config than its checkpoint was made with.

    That may be meant (more iterations, a lower learning rate); what follows is not what the run would have done.
    """
    now = config_digest(config)
    if now == manifest.config_digest:
        return
    directory.event("config-changed", iteration=manifest.iteration, before=manifest.config_digest, now=now)
    get_logger("callsheet").warning(
        "%s is not the config that the checkpoint of iteration %d was made with; the run goes on with the file's",
        directory.config_file, manifest.iteration,
    )  # fmt: skip


def manifest_of(session: Session, metrics: Mapping[str, float]) -> Manifest:
    """The manifest of the state the session is in now."""
    state = session.state
    metrics_file = session.directory.metrics
    return Manifest(
        run_id=session.directory.run_id,
        iteration=state.iteration,
        policy_version=state.policy_version,
        data_position={"epoch": state.epoch, "start": state.start},
        kl_coef=state.kl_coef,
        config_digest=config_digest(session.config),
        metrics_bytes=metrics_file.stat().st_size if metrics_file.exists() else 0,
        metrics=dict(metrics),
        state=state.to_json(),
    )
