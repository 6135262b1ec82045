"""What is public is documented, in whole sentences, and has its page in the API reference."""

from __future__ import annotations

import re
from pathlib import Path

from public_names import MODULES, docstring, modules, public

import hotbed as hb
from tools.rules_table import PAGE, with_rules

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RIDDLE = re.compile(r"(What|Of|Those|Told|It is|They|Whether)\b")


def test_what_is_public_is_documented() -> None:
    missing = [name for name, thing in public() if not docstring(name, thing)]
    assert missing == []


def test_docstrings_begin_with_a_subject_or_a_verb() -> None:
    said = {name: docstring(name, thing) for name, thing in public()}
    said |= {module.__name__: module.__doc__ or "" for module in modules()}
    riddles = {name: text for name, text in said.items() if RIDDLE.match(text)}
    assert riddles == {}


def cut_sentences(docstring: str) -> list[str]:
    """Paragraphs of prose that do not end as sentences do."""
    paragraphs = re.split(r"\n(?:[ ]*\n)+", docstring)
    prose = [p for p in paragraphs if not p.startswith(("    ", ">>>", "* ", "- ", "Args:", "|"))]
    return [p for p in prose if not re.search(r"[.:!?`]\)?$", p.rstrip())]


def test_no_sentence_is_cut() -> None:
    assert {
        name: cut for name, thing in public() if (cut := cut_sentences(docstring(name, thing)))
    } == {}
    assert cut_sentences("Does it.\n\nA feature's input is") == ["A feature's input is"]


def test_the_table_of_rules_is_what_they_declare() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_rules(page), "python -m tools.rules_table writes what the rules declare"
    for rule in hb.optim.RULES:
        assert f"| `{rule.__name__}` | {rule._rule.states} |" in page


SITE = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_every_page_is_in_the_site_and_every_module_has_one() -> None:
    pages = re.findall(r"[\w/-]+\.md$", SITE, re.MULTILINE)
    assert sorted(pages) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
    for name in MODULES:
        page = f"api/{name[1:] or 'top'}.md"
        assert f"::: hotbed{name}\n" in (DOCS / page).read_text(encoding="utf-8") and page in pages


def test_the_site_fetches_nothing() -> None:
    assert "\n  font: false" in SITE and "\n  - search\n" in SITE
    assert "http" not in SITE and "extra_" not in SITE
