"""The commands of the exporter, and the door of the `planforge` command."""

import sys


def main() -> None:
    """Run the command, or say which extra brings what it is made of."""
    try:
        from .app import main as run
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        sys.exit(f"error: the planforge command needs {error.name}: pip install 'planforge[cli]'")
    run()
