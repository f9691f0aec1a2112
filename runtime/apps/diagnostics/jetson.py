"""NVIDIA's Jetson boards: which one, its JetPack, and whether it runs at full speed."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from ...backends.threads import read_text
from .machine import Gpu, Graphics, ask_command

# By the board's name, or by what its device tree calls the chip.
ARCHITECTURES = {"sm72": ("xavier", "tegra194"), "sm87": ("orin", "tegra234"), "sm110": ("thor", "tegra264")}


@dataclass(frozen=True)
class JetPack:
    """What NVIDIA ships with a release of Jetson Linux (L4T)."""

    version: str
    cuda: str
    python: str  # that TensorRT's module is made for


# By the release or what it begins with, the longest match.
# Source: https://developer.nvidia.com/embedded/jetpack-archive
JETPACKS = {
    "32": JetPack("4", "10.2", "3.6"),
    "35": JetPack("5", "11.4", "3.8"),
    **dict.fromkeys(("35.2", "35.3", "35.4", "35.5", "35.6"), JetPack("5.1", "11.4", "3.8")),
    "36": JetPack("6.2", "12.6", "3.10"),
    "36.2": JetPack("6.0", "12.2", "3.10"),
    "36.3": JetPack("6.0", "12.2", "3.10"),
    "36.4.0": JetPack("6.1", "12.6", "3.10"),
    "38": JetPack("7.0", "13.0", "3.12"),
    "38.4": JetPack("7.1", "13.0", "3.12"),
    "39": JetPack("7.2", "13.2", "3.12"),
}


@dataclass(frozen=True)
class Power:
    """How fast the board may run."""

    mode: str | None  # nvpmodel's, such as "15W"
    number: int | None  # the mode's
    fastest: int  # the number of the mode without limits, which is not 0 on every board
    clocks_held: bool | None  # at their highest, as jetson_clocks does

    def commands(self) -> list[str]:
        """Return the commands that bring the board to full speed; none if it is there or can't be read."""
        slow = self.mode is not None and self.number != self.fastest
        if self.number is None:  # nvpmodel doesn't always print it
            slow = self.mode is not None and not self.mode.startswith("MAXN")
        mode = [f"sudo nvpmodel -m {self.fastest}"] if slow else []
        return mode + (["sudo jetson_clocks"] if slow or self.clocks_held is False else [])


@dataclass(frozen=True)
class Jetson:
    """A Jetson board."""

    board: str  # such as "NVIDIA Jetson AGX Orin Developer Kit"
    release: str | None  # of Jetson Linux, such as "36.4.3"
    jetpack: JetPack | None
    sm: str | None  # its GPU's compute capability
    power: Power


def find_jetson(root: Path) -> Jetson | None:
    """Return the board, from its device tree and /etc below `root`; None on other machines."""
    model, compatible = (read_device_tree(root, name) for name in ("model", "compatible"))
    release = parse_release(read_text(root / "etc/nv_tegra_release") or "")
    if release is None and "nvidia,tegra" not in compatible and "jetson" not in model.lower():
        return None
    sm = find_sm(f"{model} {compatible}")
    return Jetson(model or "Jetson", release, find_jetpack(release), sm, read_power(root))


def read_device_tree(root: Path, name: str) -> str:
    """Return a text of the device tree, with spaces for the zero bytes that divide it."""
    return (read_text(root / "proc/device-tree" / name) or "").replace("\0", " ").strip()


def parse_release(text: str) -> str | None:
    """Return the release in /etc/nv_tegra_release: "36.4.3" of "# R36 (release), REVISION: 4.3, ..."."""
    match = re.search(r"\bR([0-9]+) \(release\), REVISION: ([0-9]+(?:\.[0-9]+)*)", text)
    return f"{match[1]}.{match[2]}" if match else None


def find_jetpack(release: str | None) -> JetPack | None:
    """Return the JetPack of a release of Jetson Linux; for an unknown one its family's newest."""
    parts = (release or "").split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((JETPACKS[prefix] for prefix in prefixes if prefix in JETPACKS), None)


def find_sm(text: str) -> str | None:
    """Return the compute capability of the board or GPU that a text names."""
    lower = text.lower()
    return next((sm for sm, names in ARCHITECTURES.items() if any(name in lower for name in names)), None)


def read_power(root: Path) -> Power:
    """Return the power mode, by nvpmodel and its configuration, and the clocks of the first core."""
    mode, number = parse_mode(ask_command("nvpmodel", "-q")[0])
    clocks = root / "sys/devices/system/cpu/cpu0/cpufreq"
    lowest, highest = (read_text(clocks / f"scaling_{end}_freq") for end in ("min", "max"))
    held = None if lowest is None or highest is None else lowest == highest
    return Power(mode, number, find_fastest_mode(read_text(root / "etc/nvpmodel.conf") or ""), held)


def parse_mode(text: str) -> tuple[str | None, int | None]:
    """Return the mode and its number, from "NV Power Mode: MAXN" and a line "0" after it."""
    match = re.search(r"NV Power Mode:[ \t]*(\S+)[^\n]*(?:\n\s*([0-9]{1,4})\s*$)?", text, re.MULTILINE)
    return (match[1], int(match[2]) if match[2] else None) if match else (None, None)


def find_fastest_mode(configuration: str) -> int:
    """Return the number of MAXN_SUPER, or of MAXN, in nvpmodel's configuration; 0 where it has neither."""
    modes = re.findall(r"<\s*POWER_MODEL\s+ID=([0-9]{1,4})\s+NAME=(\S+)", configuration)
    numbers = {name: int(number) for number, name in modes}
    return numbers.get("MAXN_SUPER", numbers.get("MAXN", 0))


def fill_in_from_board(listed: Graphics, board: Jetson) -> Graphics:
    """Return the GPUs and CUDA as the board has them, where nvidia-smi is missing or doesn't know."""
    gpus = tuple(replace(gpu, sm=gpu.sm or find_sm(gpu.name) or board.sm) for gpu in listed.gpus)
    if not gpus and board.sm:
        gpus = (Gpu(0, board.board, board.sm),)
    cuda = listed.cuda or (board.jetpack.cuda if board.jetpack else None)
    return replace(listed, gpus=gpus, cuda=cuda, problem=None if gpus else listed.problem)
