"""The command `hotbed`. Imported by nothing else, so that `import hotbed` needs no typer."""


def main() -> None:
    """Run the command line; the exit code is 0, 2 after an error, 130 after Ctrl-C."""
    import os
    import sys

    try:
        from hotbed.cli.app import app

        app()
    except KeyboardInterrupt:
        print("Interrupted before anything was reached.", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of the output went away. Nothing can be told to it, also not at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
