"""docs/api.md is what its generator writes."""

from __future__ import annotations

import re

import hotbed as hb
from tools.api_reference import MODULES, OPTIMIZERS, PAGE, markdown, public, text, with_rules


def test_the_page_is_up_to_date() -> None:
    stale = "docs/api.md is not what the docstrings say: run `make docs`"
    assert PAGE.read_text(encoding="utf-8") == text(), stale


def test_the_table_of_rules_is_what_they_declare() -> None:
    page = OPTIMIZERS.read_text(encoding="utf-8")
    assert page == with_rules(page), (
        "docs/optimizers.md is not what the rules declare: run `make docs`"
    )
    for rule in hb.optim.RULES:
        assert f"| `{rule.__name__}` | {rule._rule.states} |" in page


def test_the_page_has_what_is_public() -> None:
    page = text()
    for name in hb.__all__:
        assert f"`hb.{name}`" in page
    assert "hb.data.hash_ids(values, *, seed: int = 0) -> Tensor" in page
    assert all(f"## `hb{module}`" in page for module in MODULES)
    assert public(hb.Table) and not public(type(hb.Embedding(2, 2)).__mro__[1])


def test_docstrings_become_markdown() -> None:
    said = (
        "Does ``it``.\n\n>>> f(1)\n\nArgs:\n    a, b: (B,) ids,\n        of any kind.\n\n"
        "Raises:\n    KeyError: no."
    )
    assert markdown(said) == (
        "Does `it`.\n\n```pycon\n>>> f(1)\n```\n\n\n**Args**\n\n- `a`, `b`: (B,) ids,\n  of any kind.\n\n"
        "**Raises**\n\n- `KeyError`: no."
    )


def cut_sentences(page: str) -> list[str]:
    """Paragraphs of prose that do not end as sentences do."""
    outside = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    paragraphs = [part.rstrip() for part in re.split(r"\n(?:[ ]*\n)+", outside) if part.strip()]
    prose = [
        part
        for part in paragraphs
        if not part.strip("\n").startswith(("#", "|", "- ", "    ", "**"))
    ]
    return [part for part in prose if not re.search(r"[.:!?]\)?$", part)]


def test_no_sentence_is_cut() -> None:
    assert cut_sentences(text()) == []
    assert "A feature's input is one of:\n\n* a tensor of ids (B,)" in text()
    assert cut_sentences("## Inputs\n\nA feature's input is\n\n## `hb`\n") == [
        "A feature's input is"
    ]
