"""Finds the extra that installs a missing module, by the command that needs it."""

from __future__ import annotations

CLI = {"rich", "typer"}
VERIFY = {*CLI, "jinja2", "onnx_ir", "onnxruntime"}
EXPORT = {*VERIFY, "huggingface_hub", "onnx", "onnxscript", "safetensors", "torch"}
# What each extra installs, as in pyproject.toml. If a command's own extra lacks a module, the first one that
# has it is named.
EXTRAS = {
    "cli": CLI,
    "cpu": {"onnxruntime"},
    "chat": {"jinja2"},
    "verify": VERIFY,
    "plot": {"matplotlib"},
    "fit": {*CLI, "matplotlib", "onnx", "onnx_ir", "onnxruntime", "sklearn"},
    "export": EXPORT,
    "import": {*EXPORT, "transformers"},
    "tensorrt": {"cuda", "onnx", "tensorrt"},
    "tensorrt-rtx": {"cuda", "onnx", "tensorrt_rtx"},
}
# The extra that a command as a whole needs.
OF_COMMAND = {
    "export": "export",
    "import": "import",
    "build": "tensorrt-rtx",
    "verify": "verify",
    "lint": "verify",
    "inspect": "verify",
    "fit-head": "fit",
}


def find_extra(command: str, module: str) -> str | None:
    """Return the extra to install for a module that a command lacks: the command's own, if it has it.

    Args:
        command: its name on the command line.
        module: as in `import module`; of a dotted name the first part counts.

    Returns:
        The extra's name; None for a module that no extra installs, which is a bug of ours.
    """
    module = module.partition(".")[0]
    own = OF_COMMAND.get(command)
    if own is not None and module in EXTRAS[own]:
        return own
    return next((extra for extra, modules in EXTRAS.items() if module in modules), None)
