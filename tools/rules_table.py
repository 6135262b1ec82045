"""Writes the table of docs/optimizers.md from the declarations of rules: python -m tools.rules_table"""

from __future__ import annotations

from pathlib import Path

from hotbed.optim import RULES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "optimizers.md"
BEGIN, END = "<!-- rules: begin -->\n", "<!-- rules: end -->"


def main() -> None:
    PAGE.write_text(with_rules(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def with_rules(page: str) -> str:
    """Return the page with the table of all rules between its markers."""
    lines = ["| class | states a row | update | source |", "|---|---|---|---|"]
    for rule in RULES:
        cells = (f"`{rule.__name__}`", rule._rule.states, rule._rule.update, rule._rule.source)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    head, rest = page.split(BEGIN, 1)
    return head + BEGIN + "\n".join(lines) + "\n" + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    main()
