"""Which extra brings a module that is missing, by the command that needs it."""

from __future__ import annotations

CLI = {"rich", "typer"}
VERIFY = {*CLI, "jinja2", "onnx_ir", "onnxruntime"}
EXPORT = {*VERIFY, "huggingface_hub", "onnx", "onnxscript", "safetensors", "torch"}
# What each extra brings, as pyproject.toml has it; the first that has a module is named where the command's
# own has it not.
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
# What a command as a whole needs.
OF_COMMAND = {
    "export": "export",
    "import": "import",
    "build": "tensorrt-rtx",
    "verify": "verify",
    "lint": "verify",
    "inspect": "verify",
    "fit-head": "fit",
}


def extra_of(command: str, module: str) -> str | None:
    """The extra to install for a module that a command lacks: the command's own, if it brings it.

    Args:
        command: its name on the command line.
        module: as in `import module`; of a dotted name the first part counts.

    Returns:
        The extra's name; None of a module that no extra brings, which is a fault of ours.
    """
    module = module.partition(".")[0]
    own = OF_COMMAND.get(command)
    if own is not None and module in EXTRAS[own]:
        return own
    return next((extra for extra, modules in EXTRAS.items() if module in modules), None)
