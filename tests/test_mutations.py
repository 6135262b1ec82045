"""`make mutate` names folders, files, lines and tests that exist, and draws changes that change something."""

from __future__ import annotations

import ast

from tools import mutate


def test_it_names_nothing_that_is_gone() -> None:
    assert mutate.unknown() == []


def test_the_longest_name_chooses_the_tests() -> None:
    assert mutate.tests_of("src/hotbed/dist/timeouts.py") == mutate.TESTS["dist/timeouts"]
    assert mutate.tests_of("src/hotbed/dist/ranks.py") == mutate.TESTS["dist"]
    assert (
        mutate.tests_of("src/hotbed/places/tiered_device/batch.py")
        == (mutate.TESTS["places/tiered_device"])
    )


def test_changes_are_one_each_and_leave_asserts_alone() -> None:
    source = (mutate.ROOT / "src/hotbed/group/lookup.py").read_text()
    plain = ast.unparse(ast.parse(source))
    for line, _, _, changed in mutate.mutants(source):
        assert changed != plain
        assert not source.splitlines()[line - 1].lstrip().startswith("assert ")
    small = "def f(a: int = 1) -> bool:\n    assert a > 0\n    return a < f(3, strict=True)\n"
    assert sorted(after for _, _, after, _ in mutate.mutants(small)) == [
        "2", "4", "a <= f(3, strict=True)"
    ]  # fmt: skip
