"""Makes Triton's interpreter prepare a module of device functions once a launch.

It prepares `triton.language` at every call of every device function, which takes most of the time
of kernels that are made of small ones.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


class _Launch:
    def __init__(self, scope: Any, prepared: set[str]) -> None:
        self.scope, self.prepared = scope, prepared

    def restore(self) -> None:
        self.prepared.clear()
        self.scope.restore()


class _Nothing:
    def restore(self) -> None:
        pass


def install() -> None:
    """For this process. Does nothing where the interpreter is built in another way."""
    prepare = getattr(interpreter, "_patch_lang", None)
    if prepare is None:
        return
    prepared: set[str] = set()  # modules, in the launch that is under way

    def once(function: Any) -> Any:
        if function.__module__ in prepared:
            return _Nothing()
        outermost = not prepared
        prepared.add(function.__module__)
        scope = prepare(function)
        return _Launch(scope, prepared) if outermost else scope

    interpreter._patch_lang = once
