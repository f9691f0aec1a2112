"""Finds the extra that installs a missing module, by the command that needs it."""

from __future__ import annotations

CLI = {"rich", "typer"}
SERVE = {
    *CLI,
    "anyio",
    "h11",
    "jinja2",
    "llguidance",
    "msgspec",
    "prometheus_client",
    "python_multipart",
    "starlette",
    "uvicorn",
}
VERIFY = {*CLI, "jinja2", "onnx_ir", "onnxruntime"}
EXPORT = {*VERIFY, "huggingface_hub", "onnx", "onnxscript", "safetensors", "torch", "transformers"}
# What each extra installs, as in pyproject.toml. If a command's own extra lacks a module, the first one that
# has it is named.
EXTRAS = {
    "cli": CLI,
    "cpu": {"onnxruntime"},
    "chat": {"jinja2"},
    "grammar": {"llguidance"},
    "serve": SERVE,
    "batch": {*CLI, "pyarrow"},
    "ray": {*SERVE, "pyarrow", "ray"},
    "verify": VERIFY,
    "plot": {"matplotlib"},
    "fit": {*CLI, "matplotlib", "onnx", "onnx_ir", "onnxruntime", "pyarrow", "sklearn"},
    "export": EXPORT,
    "tensorrt": {"cuda", "onnx", "tensorrt"},
    "tensorrt-rtx": {"cuda", "onnx", "tensorrt_rtx"},
}
# The extra that a command as a whole needs.
OF_COMMAND = {
    "export": "export",
    "import": "export",
    "build": "tensorrt-rtx",
    "verify": "verify",
    "lint": "verify",
    "inspect": "verify",
    "fit-head": "fit",
    "serve": "serve",
    "batch": "batch",
    "prove": "batch",
}


def find_extra(command: str, module: str) -> str | None:
    """Return the extra to install for a module that a command lacks: the command's own, if it has it.

    None means that no extra installs the module, which is a bug of ours.
    """
    module = module.partition(".")[0]
    own = [OF_COMMAND[command]] if command in OF_COMMAND else []
    return next((extra for extra in [*own, *EXTRAS] if module in EXTRAS[extra]), None)
