"""The command `hotbed`, up to the import of the package.

`import hotbed` imports torch, and torch loads OpenMP, which reads once how many threads there are to be
and how they wait. So what settles that lies in a package of its own.
"""

__all__ = ["main"]


def main() -> None:
    """Run the command line; the exit code is 0, 2 after an error, 130 after Ctrl-C."""
    import os
    import sys

    try:
        from hotbed_command.threads import allocate

        allocate(os.environ)
        from hotbed.cli.app import app

        app()
    except KeyboardInterrupt:
        print("Interrupted before anything was reached.", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of the output went away. Nothing can be told to it, also not at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
