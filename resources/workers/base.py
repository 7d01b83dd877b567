"""What every worker that holds a model shares: its place among the ranks, its device, its clocks, its micro-batches.

Workers are plain classes: they read RANK and its kin from the environment and can be used in-process, as rank 0 of 1.
"""

import os
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.model import ModelConfig
from configs.training import TrainedRoleConfig
from resources.batch import first_true, row_lengths, select_rows, to_padded
from resources.micro_batches import Siblings, split_rows
from resources.models.layout import lay_out
from resources.models.sharding import CommunicationClock, ParallelLayout, join_ranks, release_gathered
from resources.ranks import Mesh, device_index
from resources.telemetry.flops import PEAK_FLOPS, flop_utilisation, model_flops
from resources.workers.padding import pad_rows, stand_in

Status = dict[str, Any]
"""JSON: `metrics` (sums and counts, see tasks/algorithms/diagnostics.py) and `spans` (times and facts of this rank)."""

_DUMMY_TOKENS = 2


def set_threads(threads: int | None) -> None:
    """Threads of torch in this process. vLLM replaces `torch.set_num_threads` by a no-op, so the original is called."""
    if threads is not None:
        torch._C.set_num_threads(threads)


def fill_of(tokens: float, computed: int) -> float:
    """Real tokens over computed ones; 1 where prompts that were read once make them fewer than the real ones."""
    return min(1.0, tokens / computed) if computed else 1.0


def choose_device(local_rank: int) -> torch.device:
    """The accelerator of this rank, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = device_index(os.environ.get("CUDA_VISIBLE_DEVICES"), local_rank)
    return torch.device("cpu") if index is None else torch.device("cuda", index)


class Stopwatch:
    """Where the seconds of one call went, and what it worked on."""

    def __init__(self, rank: int, device: torch.device, clock: CommunicationClock) -> None:
        self.rank, self.device, self.clock = rank, device, clock
        self.phases: dict[str, float] = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        self.facts: dict[str, float] = {}
        self.accelerator = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self._start, self._cpu, self._communicated = time.monotonic(), time.process_time(), clock.seconds
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a block, less the collectives inside it."""
        start, communicated = time.monotonic(), self.clock.seconds
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.phases[name] += time.monotonic() - start - (self.clock.seconds - communicated)

    def spans(self) -> dict[str, float]:
        """The record of this rank: fields of `RankSpan` and facts by the names in `telemetry/facts.py`."""
        end = time.monotonic()
        utilisation = flop_utilisation(self.facts.get("model_flops", 0.0), end - self._start, _card(self.accelerator))
        if utilisation is not None:
            self.facts["flop_utilisation"] = utilisation
        tokens = self.facts.get("tokens", 0)
        return {
            "rank": self.rank,
            "start": self._start,
            "end": end,
            "cpu_seconds": time.process_time() - self._cpu,
            "communication_seconds": self.clock.seconds - self._communicated,
            "tokens_per_second": tokens / max(end - self._start, 1e-9),
            "peak_memory_bytes": _peak_memory(self.device),
            **{f"{name}_seconds": seconds for name, seconds in self.phases.items()},
            **self.facts,
        }


def _card(device_name: str) -> str:
    """The type in the table of peaks that a device's full name contains."""
    return next((card for card in PEAK_FLOPS if card in device_name.replace(" ", "-")), "")


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class ModelWorker:
    """Base of the workers that hold a model."""

    role = "model"
    module: Any
    """What scores and is trained; a subclass makes it."""
    answers_are_copied = False
    """Whether what a method returns is copied before the next call can change it; the process of a worker says so."""

    def __init__(
        self,
        model: ModelConfig,
        settings: TrainedRoleConfig,
        seed: int,
        *,
        threads: int | None = None,
        tensor_parallel: int = 1,
        sequence_parallel: int = 1,
    ) -> None:
        set_threads(threads)
        self.model_config, self.settings, self.seed = model, settings, seed
        self.rank, self.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.device = choose_device(int(os.environ.get("LOCAL_RANK", "0")))
        mesh = Mesh(tp=tensor_parallel, sp=sequence_parallel)
        self.layout: ParallelLayout = join_ranks(self.rank, self.world_size, mesh, self.device.type)
        self.clock = CommunicationClock()
        self.num_parameters = 0
        self.shape: tuple[int, int] | None = None
        """Layers and width, for counting operations."""

    def lay_out(self, module: nn.Module, *, is_trained: bool) -> tuple[str, ...]:
        """Put the whole, CPU-resident `module` onto this role's ranks; see `resources/models/layout.py`."""
        self.num_parameters = sum(parameter.numel() for parameter in module.parameters())
        config = next(part.config for part in module.modules() if isinstance(part, PreTrainedModel)).get_text_config()
        self.shape = (int(config.num_hidden_layers), int(config.hidden_size))
        return lay_out(
            module,
            self.model_config,
            self.layout,
            is_trained=is_trained,
            fsdp=self.settings.fsdp,
            device=self.device,
            clock=self.clock,
        )

    def stopwatch(self) -> Stopwatch:
        """A new one, for one call."""
        watch = Stopwatch(self.rank, self.device, self.clock)
        watch.facts["num_parameters"] = self.num_parameters
        return watch

    def note_flops(self, watch: Stopwatch, lengths: Sequence[int], *, is_training: bool) -> None:
        """This rank's share of the operations that the model needs for rows of these lengths.

        Tensor- and sequence-parallel peers have the same rows, and each does an equal part of the work on them.
        """
        if self.shape is None or not lengths:
            return
        whole = model_flops(
            num_parameters=self.num_parameters,
            num_layers=self.shape[0],
            hidden_size=self.shape[1],
            tokens=sum(lengths),
            mean_length=sum(length * length for length in lengths) / max(1, sum(lengths)),
            is_training=is_training,
        )
        watch.facts["model_flops"] = whole / (self.layout.mesh.tp * self.layout.mesh.sp)

    def scoring_batches(self, rows: TensorDictBase, watch: Stopwatch) -> Iterator[list[int]]:
        """Positions of `rows` per forward pass without gradients; as many passes on every rank."""
        before = self.module.tokens_computed
        try:
            yield from self._scoring_plan(rows, watch)
        finally:
            release_gathered(self.module)
        watch.facts["micro_batch_fill"] = fill_of(watch.facts["tokens"], self.module.tokens_computed - before)

    def _scoring_plan(self, rows: TensorDictBase, watch: Stopwatch) -> list[list[int]]:
        lengths = row_lengths(rows.get("input_ids")).tolist()
        size = self.settings.log_prob_micro_batch_size or self.settings.micro_batch_size
        budget = self.settings.micro_batch_tokens
        batches = split_rows(lengths, size, budget, self._siblings(rows))
        watch.facts |= {
            "rows": len(lengths),
            "tokens": sum(lengths),
            "micro_batches": len(batches),
        }
        self.note_flops(watch, lengths, is_training=False)
        if self.world_size > 1:
            busiest = torch.tensor(len(batches), device=self.device)
            with self.clock:
                dist.all_reduce(busiest, op=dist.ReduceOp.MAX)
            batches += [[] for _ in range(int(busiest) - len(batches))]
        return batches

    def _siblings(self, rows: TensorDictBase) -> Siblings | None:
        """Of a module whose passes read a prompt once, on rows that say which prompt it is."""
        if not getattr(self.module, "shares_prompts", False) or "group_ids" not in set(rows.keys()):
            return None
        prompts = first_true(to_padded(rows.get("response_mask")))
        return Siblings(groups=rows["group_ids"].tolist(), prompts=prompts.tolist())

    def micro_batch(self, rows: TensorDictBase, row_ids: Sequence[int]) -> dict[str, Tensor]:
        """The rows padded to the longest of them, on the device; a stand-in with nothing to train for no rows."""
        multiple = self.layout.mesh.sp
        if len(row_ids) == 0:
            return {name: value.to(self.device) for name, value in stand_in(rows, _DUMMY_TOKENS * multiple).items()}
        return {name: value.to(self.device) for name, value in pad_rows(select_rows(rows, row_ids), multiple).items()}

    def sum_over_ranks(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """All-reduce over the data-parallel ranks, in place; nothing to do for one."""
        if self.layout.dp_size > 1:
            with self.clock:
                dist.all_reduce(values, op=op, group=self.layout.group("dp"))
        return values
