"""Writes docs/api.md from signatures and docstrings, and the rules of docs/optimizers.md from their
declarations: python -m tools.api_reference"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
MODULES = ("", ".optim", ".nn", ".data", ".init", ".models", ".train", ".checkpoint", ".dist")
WIDTH = 100
EXAMPLES = """\
import torch, hotbed as hb
from torch.nn.functional import binary_cross_entropy_with_logits as loss_fn

model = hb.models.DLRM([hb.Table("item", dim=16, rows=1000)])
optimizer = hb.optim.Adagrad(model.parameters(), lr=0.02)
items, labels = torch.randint(1000, (10, 8)), torch.rand(10, 8).round()
loader = [{"dense": torch.rand(8, 13), "item": i, "label": l} for i, l in zip(items, labels)]
"""
"""What the examples of docstrings go on from."""

HEAD = f"""# API reference

Written by `make docs` from the signatures and docstrings of what is public. Examples go on from these
lines:

```python
{EXAMPLES}```
"""

OPTIMIZERS = PAGE.with_name("optimizers.md")


def main() -> None:
    PAGE.write_text(text(), encoding="utf-8")
    OPTIMIZERS.write_text(with_rules(OPTIMIZERS.read_text(encoding="utf-8")), encoding="utf-8")


def with_rules(page: str) -> str:
    """A page with the tables of all rules between their markers."""
    rules = importlib.import_module("hotbed.optim").RULES
    cells = [
        (f"`{rule.__name__}`", rule._rule.states, rule._rule.update, rule._rule.source)
        for rule in rules
    ]
    page = between(page, "rules", table(("class", "states a row", "update", "source"), cells))
    alike: dict[tuple[tuple[str, str, str], ...], list[str]] = {}
    for rule in rules:
        alike.setdefault(rule._rule.exact, []).append(rule.__name__)
    cells = [(", ".join(names), *row) for rows, names in alike.items() for row in rows]
    cells.append(COUPLED)
    head = ("rule", "option", "`exact` is", "cost of a missed stretch, or why")
    return between(page, "exact", table(head, cells))


COUPLED = (
    "every rule but SGD",
    "L2 added to the gradient",
    "refused",
    "g = wd·w makes each missed step depend on the one before through a square root",
)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |")
    return "\n".join(lines) + "\n"


def between(page: str, name: str, written: str) -> str:
    """The page with `written` between the markers of this name."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    head, rest = page.split(begin, 1)
    return head + begin + written + end + rest.split(end, 1)[1]


def text() -> str:
    """The whole page."""
    modules = [importlib.import_module("hotbed" + name) for name in MODULES]
    parts = [HEAD, contents(modules), inputs()]
    told: set[int] = set()
    for module in modules:
        parts.append(f"## `{short(module)}`\n")
        parts.append(markdown(inspect.getdoc(module) or "") + "\n")
        for name in module.__all__:
            thing = getattr(module, name)
            if not isinstance(thing, ModuleType) and id(thing) not in told:
                told.add(id(thing))
                parts += entry(module, name, thing)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


def contents(modules: list[ModuleType]) -> str:
    lines = ["| module | names |", "|---|---|"]
    for module in modules:
        names = [n for n in module.__all__ if not isinstance(getattr(module, n), ModuleType)]
        lines.append(f"| `{short(module)}` | {', '.join(f'`{name}`' for name in names)} |")
    return "\n".join(lines) + "\n"


def inputs() -> str:
    """What a feature's input may be, as `hotbed.inputs` lists it."""
    module = importlib.import_module("hotbed.inputs")
    _, begin, kinds = (inspect.getdoc(module) or "").partition("A feature's input is one of:")
    assert begin, "the docstring of hotbed.inputs no longer lists the kinds"
    return f"## Inputs\n\n{markdown(begin + kinds)}\n"


def short(module: ModuleType) -> str:
    return module.__name__.replace("hotbed", "hb", 1)


def entry(module: ModuleType, name: str, thing: Any) -> Iterator[str]:
    """A name's section: how it is called, what it says of itself, its fields and methods."""
    full = f"{short(module)}.{name}"
    yield f"### `{full}`\n"
    if not (inspect.isclass(thing) or inspect.isroutine(thing)):
        yield markdown(documented(module).get(name, "")) + "\n"
        return
    if not (inspect.isclass(thing) and issubclass(thing, (Exception, enum.Enum))):
        yield f"```\n{call(full, thing)}\n```\n"
    if inspect.isclass(thing) and issubclass(thing, Exception):
        yield f"Bases: {', '.join(f'`{base.__name__}`' for base in thing.__bases__)}.\n"
    own = thing.__dict__.get("__doc__") if inspect.isclass(thing) else thing.__doc__
    yield markdown(inspect.cleandoc(own or "")) + "\n"
    if inspect.isclass(thing):
        for field, said in documented(thing).items():
            yield f"- `{field}`: " + " ".join(markdown(said).split())
        yield ""
        yield from members(thing)


def members(cls: type) -> Iterator[str]:
    """Methods and properties with a docstring, also of bases that have no section of their own."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if not base.__module__.startswith("hotbed") or (base is not cls and public(base)):
            continue
        for name, member in vars(base).items():
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            function = getattr(member, "__func__", member)
            said = inspect.cleandoc(getattr(function, "__doc__", None) or "")
            if inspect.isroutine(function) and base.__name__ not in function.__qualname__:
                continue  # torch puts wrapped methods of the base into classes
            if isinstance(member, property) and said:
                yield f"#### `.{name}`\n\n{markdown(said)}\n"
            elif inspect.isroutine(function) and said:
                shown = call("." + name, function, method=not isinstance(member, staticmethod))
                head = shown if "\n" not in shown else f".{name}(...)"
                code = "" if head == shown else f"```\n{shown}\n```\n\n"
                yield f"#### `{head}`\n\n{code}{markdown(said)}\n"


def public(cls: type) -> bool:
    return any(
        getattr(importlib.import_module("hotbed" + name), cls.__name__, None) is cls
        and cls.__name__ in importlib.import_module("hotbed" + name).__all__
        for name in MODULES
    )


def call(name: str, function: Any, *, method: bool = False) -> str:
    """`name(argument: type = default, ...) -> type`, in one line if it fits."""
    if inspect.isclass(function) and hasattr(function, "_fields"):
        return f"{name}({', '.join(function._fields)})"
    signature = inspect.signature(function)
    shown: list[str] = []
    starred = False
    for at, parameter in enumerate(signature.parameters.values()):
        if (method and at == 0) or parameter.name.startswith("_"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            shown.append("*")
            starred = True
        starred = starred or parameter.kind is parameter.VAR_POSITIONAL
        shown.append(argument(parameter))
    result = kind(signature.return_annotation)
    arrow = "" if inspect.isclass(function) or not result else f" -> {result}"
    line = f"{name}({', '.join(shown)}){arrow}"
    if len(line) <= WIDTH:
        return line
    lines = [""]
    for part in shown:
        if len(lines[-1]) + len(part) > WIDTH - 6:
            lines.append("")
        lines[-1] += (", " if lines[-1] else "") + part
    return f"{name}(\n" + "".join(f"    {line},\n" for line in lines) + f"){arrow}"


def argument(parameter: inspect.Parameter) -> str:
    star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    shown = star + parameter.name
    told = kind(parameter.annotation)
    if told:
        shown += f": {told}"
    if parameter.default is not parameter.empty:
        default = parameter.default
        value = "..." if "factory" in repr(default) else getattr(default, "__name__", repr(default))
        shown += f" = {value}" if told else f"={value}"
    return shown


def kind(annotation: Any) -> str:
    """An annotation as it is written in the source."""
    return annotation if isinstance(annotation, str) and annotation != "Any" else ""


def documented(thing: Any) -> dict[str, str]:
    """What stands under each assignment of a class or module."""
    body = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
    if inspect.isclass(thing):
        body = body[0].body  # type: ignore[attr-defined]
    found = {}
    for node, below in zip(body, body[1:], strict=False):
        if not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)):
            continue
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(node, ast.Assign):
            target = node.targets[0]
        if isinstance(target, ast.Name) and not target.id.startswith("_"):
            found[target.id] = inspect.cleandoc(str(below.value.value))
    return found


SECTIONS = re.compile(r"^(Args|Attributes|Returns|Raises|Yields):$")


def markdown(docstring: str) -> str:
    """A docstring as Markdown: sections as lists, examples as code, double backticks as single ones."""
    lines: list[str] = []
    section = ""
    in_code = False
    for line in docstring.splitlines():
        code = line.startswith((">>> ", "... "))
        if code != in_code:
            lines.append("```pycon" if code else "```\n")
            in_code = code
        heading = SECTIONS.match(line)
        if heading:
            section = heading[1]
            lines.append(f"**{section}**\n")
        elif not line.startswith(" ") and line:
            section = ""
            lines.append(line if code else line.replace("``", "`"))
        elif section:
            lines.append(item(line[4:].replace("``", "`"), section))
        else:
            lines.append(line if line.startswith("    ") else line.replace("``", "`"))
    return "\n".join(lines + ["```"] * in_code)


def item(line: str, section: str) -> str:
    name, colon, rest = line.partition(": ")
    if section in ("Returns", "Yields") or not colon or line.startswith(" "):
        return "  " + line.strip() if line.startswith(" ") else line
    names = ", ".join(f"`{n.strip()}`" for n in name.split(","))
    return f"- {names}: {rest}"


if __name__ == "__main__":
    main()
