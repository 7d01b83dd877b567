"""A user's own advantage and loss: called with the settings they ask for, and what they return is looked at.

The wrappers travel to workers with the function, so nothing here imports Prefect. Whatever is wrong is told under the
key of the configuration that named the function.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from resources.import_paths import ImportPathError, import_callable
from tasks.algorithms.diagnostics import Metrics
from tasks.algorithms.masking import zero_masked
from tasks.algorithms.off_policy import rollout_correction

Columns = Mapping[str, Tensor]


def own_function(path: str, key: str, arguments: tuple[str, ...], settings: Mapping[str, Any]) -> Callable[..., Any]:
    """The function at `path`, with those of `settings` filled in that it asks for by name (all for `**settings`).

    Raises ValueError, naming the config's `key`, for a function that is not there or cannot be called with `arguments`.
    """
    try:
        function = import_callable(path)
        signature = inspect.signature(function)
        takes_all = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
        asked = {name: value for name, value in settings.items() if takes_all or name in signature.parameters}
        signature.bind(*arguments, **asked)
    except ImportPathError as error:
        raise ValueError(f"{key} is {path!r}; {error}") from error
    except (TypeError, ValueError) as error:  # it does not fit, or is a builtin that tells no signature
        raise ValueError(
            f"{key} is {path!r}, which cannot be called with ({', '.join(arguments)}): {error}; beyond them it may ask "
            f"for {sorted(settings)}"
        ) from error
    return partial(function, **asked)


def checked_advantages(
    columns: Columns,
    *,
    function: Callable[..., Any],
    path: str,
    needed: tuple[str, ...] = (),
    correction: str = "off",
    correction_lower: float = 0.0,
    correction_upper: float = 2.0,
) -> tuple[dict[str, Tensor], Metrics]:
    """Advantages of the user's `function(columns)`, which returns (new columns [B, T], metrics as sums and counts).

    Only `advantages` has to be among them, and what `needed` names. Where it says no `train_mask`, sampled tokens of
    scorable rows are trained; where it says no `correction_weights`, the run's correction is made here.

    Raises:
        ValueError: anything else than that, a column of another shape, an advantage that is not finite.
    """
    mask = columns["response_mask"]
    answer = function(columns)
    if not (isinstance(answer, tuple) and len(answer) == 2 and all(isinstance(part, Mapping) for part in answer)):
        raise ValueError(
            f"algorithm.advantage {path!r} returned a {type(answer).__name__}; it returns (new columns, metrics)"
        )
    new, metrics = dict(answer[0]), dict(answer[1])
    for name in ("advantages", *needed):
        if name not in new:
            raise ValueError(f"algorithm.advantage {path!r} gave no {name!r}, which this run needs; it gave {[*new]}")
    new.setdefault("train_mask", mask & ~columns["scores"].isnan()[:, None] if "scores" in columns else mask)
    for name, column in new.items():
        if not isinstance(column, Tensor) or column.shape != mask.shape:
            found = tuple(column.shape) if isinstance(column, Tensor) else type(column).__name__
            wanted = tuple(mask.shape)
            raise ValueError(f"algorithm.advantage {path!r} gave {name!r} as {found}; it is a tensor {wanted}")
    new["train_mask"] = new["train_mask"].bool() & mask
    if correction != "off" and "correction_weights" not in new:
        new["correction_weights"], new["train_mask"], gap = rollout_correction(
            columns["old_log_probs"], columns["rollout_log_probs"], new["train_mask"],
            mode=correction, lower=correction_lower, upper=correction_upper,
        )  # fmt: skip
        metrics = {**gap, **metrics}
    wrong = ~new["advantages"].isfinite() & new["train_mask"]
    if wrong.any():
        row, token = (int(index) for index in wrong.nonzero()[0])
        raise ValueError(
            f"algorithm.advantage {path!r} gave {float(new['advantages'][row, token])} at row {row}, token {token} "
            f"({int(wrong.sum())} tokens in all); advantages of trained tokens are finite"
        )
    new["advantages"] = zero_masked(new["advantages"].float(), new["train_mask"])
    return new, metrics


def checked_loss(
    log_probs: Tensor, entropy: Tensor | None, td: Columns, *, function: Callable[..., Any], path: str
) -> tuple[Tensor, Metrics]:
    """The user's `function(log_probs, entropy, td)`, which returns (loss, metrics as sums and counts).

    Raises:
        ValueError: anything else, a loss that is no single number, or one without a gradient.
    """
    answer = function(log_probs, entropy, td)
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping)):
        raise ValueError(f"algorithm.loss {path!r} returned a {type(answer).__name__}; it returns (loss, metrics)")
    loss, metrics = answer
    if not isinstance(loss, Tensor) or loss.dim():
        found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"algorithm.loss {path!r} returned a loss {found}; it is a tensor of no dimension")
    if td["response_mask"].any() and not loss.requires_grad:
        raise ValueError(f"algorithm.loss {path!r} returned a loss without a gradient; make it of log_probs")
    return loss, dict(metrics)
