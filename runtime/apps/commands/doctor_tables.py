"""The tables that `planforge doctor` prints to a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..diagnostics.doctor import NO_GPU, Diagnosis, Facts
from ..diagnostics.packages import NOT_NEEDED
from .tables import FittingTable, format_size

if TYPE_CHECKING:
    from rich.console import RenderableType

NOT_KNOWN = "not known"


def tabulate_diagnosis(diagnosis: Diagnosis) -> list[RenderableType]:
    """Return tables of the machine, its GPUs, its packages, and the backends with what each lacks."""
    facts = diagnosis.facts
    backends = [(r.backend, "yes" if r.available else "no", r.reason, r.remedy) for r in diagnosis.backends]
    return [
        FittingTable("Machine", ("", ""), describe_machine(facts)),
        FittingTable("GPU", ("", ""), describe_gpus(facts)),
        FittingTable("Packages", ("", "", ""), describe_packages(facts)),
        FittingTable("Backends, the best first", ("", "runs", "why", "what to do"), backends),
    ]


def describe_machine(facts: Facts) -> list[tuple[str, str]]:
    """Return rows for the processor, the memory, and the board of a Jetson."""
    cpu = facts.processor
    memory = facts.memory
    cores = f"{cpu.physical_cores} physical of {cpu.logical_cores} logical cores"
    limit = "" if cpu.cgroup_limit is None else f", cgroup limit {cpu.cgroup_limit:g}"
    features = ", ".join(f"{name} {'yes' if has else 'no'}" for name, has in cpu.features.items())
    total, free = (
        NOT_KNOWN if size is None else format_size(size) for size in (memory.total, memory.available)
    )
    rows = [
        ("planforge", f"{facts.planforge}, Python {facts.python}"),
        ("system", f"{facts.system}, {facts.libc}" if facts.libc else facts.system),
        ("processor", f"{cpu.name}, {cpu.architecture}, {cores}{limit}"),
        ("instructions", features or NOT_KNOWN),
        ("memory", f"{total}, available {free}"),
    ]
    if board := facts.jetson:
        jetpack = board.jetpack.version if board.jetpack else NOT_KNOWN
        clocks = {True: "held at their highest", False: "changing with the load", None: NOT_KNOWN}
        rows += [
            ("board", f"{board.board}, Jetson Linux {board.release or NOT_KNOWN}, JetPack {jetpack}"),
            ("power mode", f"{board.power.mode or NOT_KNOWN}, clocks {clocks[board.power.clocks_held]}"),
        ]
    return rows


def describe_gpus(facts: Facts) -> list[tuple[str, str]]:
    """Return a row for each GPU, and rows for their driver and CUDA."""
    graphics = facts.graphics
    shared = "memory shared with the processor" if facts.jetson else f"memory {NOT_KNOWN}"
    rows = []
    for gpu in graphics.gpus:
        memory = format_size(gpu.memory) if gpu.memory else shared
        rows.append((str(gpu.index), f"{gpu.name}, {gpu.sm or f'sm {NOT_KNOWN}'}, {memory}"))
    if not rows:
        rows = [("none", graphics.problem or NO_GPU)]
    versions = (("driver", graphics.driver), ("CUDA", graphics.cuda))
    return rows + [(name, text) for name, text in versions if text]


def describe_packages(facts: Facts) -> list[tuple[str, str, str]]:
    """Return a row for each installed package, and for each missing module."""
    return [
        (name, version, "not needed to run bundles" if package.module in NOT_NEEDED else "")
        for package in facts.packages
        for name, version in (package.versions or {package.module: "not installed"}).items()
    ]
