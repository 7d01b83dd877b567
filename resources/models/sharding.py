"""How a model lies over ranks: FSDP2 over data- and sequence-parallel ranks, on top of tensor parallelism.

Gradients are *summed* over ranks, never averaged: every loss is already divided by a global count, so data-parallel
sizes 1, 2 and an uneven 3 give one and the same gradient. gloo on CPU, NCCL on GPU.
"""

import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from resources.models.working_copies import WorkingCopies
from resources.ranks import Coordinates, Mesh

GROUP_TIMEOUT = timedelta(minutes=30)
"""Longest a collective may wait; supervision ends a stuck group much earlier, this is the last resort."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_WHOLE: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Modules of which this rank's shard is all there is: they stay in the arithmetic's dtype until the weights change."""
_COPIES: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[WorkingCopies]]" = weakref.WeakKeyDictionary()
"""Of modules on one rank whose arithmetic has another dtype than their weights; a module's hook holds them."""


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """A rank's place among the ranks of its role, and the process groups that follow from it."""

    rank: int = 0
    world_size: int = 1
    mesh: Mesh = field(default_factory=Mesh)
    devices: DeviceMesh | None = None
    """Axes dp, sp, tp; None for a role of one rank."""

    @property
    def at(self) -> Coordinates:
        return self.mesh.coordinates(self.rank, self.world_size)

    @property
    def dp_size(self) -> int:
        return self.mesh.dp_size(self.world_size)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The peers of this rank along `axis`."""
        assert self.devices is not None, f"a role of one rank has no {axis} group"
        return self.devices[axis].get_group()


def join_ranks(rank: int, world_size: int, mesh: Mesh, device_type: str) -> ParallelLayout:
    """Join the process group of the role (`env://` as injected) and lay out its axes."""
    if world_size == 1:
        return ParallelLayout(mesh=mesh)
    ensure_process_group(device_type)
    sizes = (mesh.dp_size(world_size), mesh.sp, mesh.tp)
    devices = init_device_mesh(device_type, sizes, mesh_dim_names=("dp", "sp", "tp"))
    return ParallelLayout(rank=rank, world_size=world_size, mesh=mesh, devices=devices)


def ensure_process_group(device_type: str) -> None:
    """Initialise the default process group unless this process has one (a fused neighbour may have made it)."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method="env://", timeout=GROUP_TIMEOUT)


class CommunicationClock:
    """Seconds this rank spent inside collectives, waiting for slower peers included."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.monotonic() - self._start


def shard_module(
    module: nn.Module,
    layout: ParallelLayout,
    *,
    dtype: str,
    fsdp: bool,
    device: torch.device,
    clock: CommunicationClock,
) -> nn.Module:
    """Move `module` to `device`, cut its parameters over the ranks, and set the arithmetic's dtype.

    float32 on a single rank needs none of it and stays a plain module. `fsdp=False` keeps a whole copy on every rank
    and sums gradients. Parameters stay float32 masters; with bfloat16 they are cast when gathered (on a single rank:
    before a pass), and gradients are summed in float32.
    """
    module.to(device)
    if layout.world_size == 1:
        if dtype != "float32":
            # On an accelerator memory is what others wait for; on CPUs it is there from the next update on anyway.
            copies = WorkingCopies(module, DTYPES[dtype], keeps=device.type == "cpu")
            _COPIES[module] = weakref.ref(copies)
        return module
    rows = layout.dp_size * layout.mesh.sp
    if rows == 1 and dtype == "float32":
        return module
    if not fsdp and layout.mesh.tp > 1:
        raise ValueError(
            "fsdp is false and tensor_parallel is above 1; tensor parallelism lies under FSDP2, so leave fsdp on"
        )
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh = _data_mesh(layout, fsdp, device.type)
    blocks = repeated_blocks(module)
    is_whole = mesh.size(mesh.ndim - 1) == 1
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not is_whole)
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if is_whole:
        _WHOLE.add(module)
    for part in [*blocks, module]:
        assert isinstance(part, FSDPModule)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
        if device.type == "cpu":
            _time_collectives(part, clock)
    return module


def _data_mesh(layout: ParallelLayout, fsdp: bool, device_type: str) -> DeviceMesh:
    """The mesh FSDP2 shards over: data x sequence ranks; two-dimensional with a shard size of 1 to replicate."""
    assert layout.devices is not None, "a role of one rank shards nothing"
    if not fsdp:
        return init_device_mesh(device_type, (layout.world_size, 1), mesh_dim_names=("replicate", "shard"))
    return layout.devices["dp", "sp"]._flatten("rows")


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The decoder layers: what is gathered, used and dropped one at a time."""
    names: set[str] = set()
    for part in module.modules():
        names.update(getattr(part, "_no_split_modules", None) or ())
    return [part for part in module.modules() if type(part).__name__ in names and any(True for _ in part.parameters())]


def set_gradient_sync(module: nn.Module, is_last: bool) -> None:
    """Sum gradients over ranks in this backward pass only if it is the last of the mini-batch."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(is_last)
        module.set_is_last_backward(is_last)
        module.set_reshard_after_backward(is_last or module not in _WHOLE)


def release_gathered(module: nn.Module) -> None:
    """Drop gathered parameters after the passes: no backward pass may have followed to do it.

    Until then the module's parameters are the gathered ones, in the dtype of the arithmetic: whoever saves, loads or
    sends weights would meet those in place of the float32 masters.
    """
    copies = _copies_of(module)
    if copies is not None:
        copies.put_back()
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def drop_copies(module: nn.Module) -> None:
    """Free the copies that this rank keeps in the arithmetic's dtype: the weights are about to change."""
    copies = _copies_of(module)
    if copies is not None:
        copies.drop()


def in_dtype_of_passes(
    module: nn.Module, named: Iterable[tuple[str, Tensor]], dtype: str
) -> Iterable[tuple[str, Tensor]]:
    """`named`, the module's own weights as its passes compute with them where those have `dtype` and are kept."""
    copies = _copies_of(module)
    return named if copies is None or copies.dtype != DTYPES[dtype] else copies.in_place_of(named)


def _copies_of(module: nn.Module) -> WorkingCopies | None:
    return _COPIES[module]() if module in _COPIES else None


class _TimedAllGather:
    """FSDP2's all-gather on gloo, done at once and timed."""

    def __init__(self, clock: CommunicationClock) -> None:
        self.clock = clock

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        with self.clock:
            dist.all_gather_single(output_tensor, input_tensor, group=group)


class _TimedReduceScatter:
    """FSDP2's reduce-scatter on gloo, done at once and timed."""

    def __init__(self, clock: CommunicationClock) -> None:
        self.clock = clock

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        with self.clock:
            dist.reduce_scatter_single(output_tensor, input_tensor, group=group, op=op)


def _time_collectives(part: FSDPModule, clock: CommunicationClock) -> None:
    part.set_custom_all_gather(_TimedAllGather(clock))  # pyright: ignore[reportArgumentType]
    part.set_custom_reduce_scatter(_TimedReduceScatter(clock))  # pyright: ignore[reportArgumentType]


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_like(local: Tensor, model: Tensor) -> Tensor:
    """Declare `local` to be this rank's part of a tensor that lies like `model` does."""
    if not isinstance(model, DTensor):
        return local
    return DTensor.from_local(
        local, model.device_mesh, model.placements, run_check=False, shape=model.shape, stride=model.stride()
    )


def replicas(tensor: Tensor, world_size: int) -> int:
    """On how many ranks of the role each value of `tensor` stands."""
    if not isinstance(tensor, DTensor):
        return world_size
    cut = 1
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            cut *= tensor.device_mesh.size(axis)
    return world_size // cut


def whole_tensors(named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Gather the tensors one by one; every rank must run through them together."""
    for name, tensor in named:
        yield name, (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
