"""The exporter's commands, and the entry point of the `planforge` command."""

import sys


def main() -> None:
    """Run the command, or say which extra installs the packages that it needs."""
    try:
        from .app import main as run
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        sys.exit(f"error: the planforge command needs {error.name}: pip install 'planforge[cli]'")
    run()
