"""All of an engine's new weights in one go."""

from collections.abc import Collection

from resources.engines.base import Engine, WeightReport, Weights


def update_weights(engine: Engine, weights: Weights, version: int, expected_names: Collection[str]) -> WeightReport:
    """Open the engine, load, close. Raises WeightMismatchError."""
    engine.begin_update()
    engine.load_weights(weights)
    return engine.finish_update(version, expected_names)
