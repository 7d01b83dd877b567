"""Prints a plan as the call sheet a person reads: placement, environment, batch, memory."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from resources.memory import gib
from resources.placement import PlacedRank, Placement
from resources.plan import Plan

_PARTS = {
    "weights": "weights",
    "gradients": "grads",
    "optimizer": "optim.",
    "activations": "activ.",
    "kv_cache": "KV",
    "communication": "comm.",
}
"""Part of a role's memory -> column title."""


def print_plan(plan: Plan, console: Console) -> None:
    """The whole sheet, refusals last, where the eye ends."""
    console.print(f"[bold]Call sheet of {plan.config.name}[/bold]")
    if isinstance(plan.placement, Placement):
        console.print(_ranks(plan.placement))
        console.print(_environment(plan.placement))
        console.print(_others(plan.placement))
        console.print(_nodes(plan.placement))
    console.print(_batch(plan))
    console.print(_memory(plan))
    console.print(_bundles(plan))
    for remark in plan.remarks:
        console.print(f"note: {remark}", markup=False, highlight=False)
    doubts = "; ".join(filter(None, (plan.doubtful_memory, plan.unchecked_memory, plan.absent_weights)))
    if plan.does_fit and doubts:
        console.print("[bold yellow]The placement fits:[/bold yellow]", end=" ")
        console.print(doubts, markup=False, highlight=False, soft_wrap=True)
    elif plan.does_fit:
        console.print("[bold green]It fits.[/bold green]")
    else:
        for refusal in plan.refusals:
            console.print(refusal, markup=False, highlight=False, soft_wrap=True)
        console.print("[bold red]It does not fit.[/bold red]")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _ranks(placement: Placement) -> Table:
    table = _table("Who works where", "pool", "node", "bundle", "processes that share it")
    for pool in placement.pools.values():
        for bundle, place in enumerate(pool.bundles):
            inside = [rank for rank in placement.ranks if (rank.pool, rank.bundle) == (pool.pool, bundle)]
            table.add_row(pool.pool, place.node_ip, str(bundle), "\n".join(map(_process, inside)))
    return table


def _process(rank: PlacedRank) -> str:
    share = f", {rank.accelerators:g} accelerator" if rank.accelerators else ""
    return f"{_spaced(rank.group)}, rank {rank.rank} of {rank.world_size}: {rank.cpus:g} CPUs{share}"


def _environment(placement: Placement) -> Table:
    table = _table("Environment", "role", "ranks", "environment")
    for group in dict.fromkeys(rank.group for rank in placement.ranks):
        ranks = [rank for rank in placement.ranks if rank.group == group]
        shared = {key: value for key, value in ranks[0].env.items() if all(rank.env[key] == value for rank in ranks)}
        table.add_row(_spaced(group), f"all {len(ranks)}" if len(ranks) > 1 else "0", _settings(shared))
        for rank in ranks:
            own = {key: value for key, value in rank.env.items() if key not in shared}
            if own:
                table.add_row("", str(rank.rank), _settings(own))
    return table


def _settings(env: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in env.items())


def _spaced(group: str) -> str:
    return group.replace("+", " + ")


def _others(placement: Placement) -> Table:
    table = _table("Other processes", "process", "count", "where", "note")
    for other in placement.others:
        table.add_row(other.name, str(other.count), other.where, other.note)
    return table


def _nodes(placement: Placement) -> Table:
    names = sorted({name for node in placement.nodes for name in node.total} - {"memory"})
    table = _table("Nodes", "node", "type", *(f"{name} left of" for name in names))
    for node in placement.nodes:
        left = placement.left[node.node_id]
        cells = [f"{left.get(name, 0.0):g} / {node.total.get(name, 0.0):g}" for name in names]
        table.add_row(f"{node.ip} ({node.node_id[:12]})", node.accelerator_type or "-", *cells)
    return table


def _batch(plan: Plan) -> Table:
    algebra = plan.algebra
    table = _table("Batch of an iteration", "level", "size")
    table.add_row(
        "rows",
        f"{algebra.prompts} prompts x {algebra.group_size} responses = {algebra.rows}, up to {algebra.longest} tokens",
    )
    table.add_row("rollout", f"{algebra.rows_per_engine} rows on each of {algebra.engines} engines")
    table.add_row("mini-batches", f"{algebra.mini_batches} of {algebra.rows_per_mini_batch} rows")
    table.add_row("optimizer steps", f"{algebra.steps} ({algebra.epochs} epochs)")
    for share in algebra.shares:
        rows = (
            str(share.rows_most) if share.rows_most == share.rows_least else f"{share.rows_least} to {share.rows_most}"
        )
        table.add_row(
            f"{share.duty}, a rank's step",
            f"{rows} rows on each of {share.ranks} ranks: {share.micro_batches} micro-batches of {share.micro_batch}",
        )
    return table


def _memory(plan: Plan) -> Table:
    table = _table("Memory of a rank of each role (docs/memory.md)", "role", *_PARTS.values(), "total")
    for duty, memory in plan.memory.items():
        amounts = [getattr(memory, part) for part in _PARTS]
        table.add_row(duty, *(gib(amount) if amount else "-" for amount in amounts), gib(memory.total))
    return table


def _bundles(plan: Plan) -> Table:
    table = _table("Memory of a bundle", "pool", "bundles", "roles", "at once", "available", "verdict")
    for bundle in plan.bundles:
        ends = sorted({bundle.bundles[0], bundle.bundles[-1]})
        available = gib(bundle.capacity) if bundle.capacity is not None else "not known"
        roles = ", ".join(bundle.duties)
        table.add_row(bundle.pool, " to ".join(map(str, ends)), roles, gib(bundle.total), available, bundle.verdict)
    return table
