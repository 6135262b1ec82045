"""The command `hotbed`. Imported by nothing else in the package, so that `import hotbed` needs no
typer; `hotbed_command` starts it."""
