"""What a new rule of an optimizer takes: a toy one is added to a copy of five files."""

from __future__ import annotations

import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hotbed as hb

ROOT = Path(__file__).parents[2]
RULES = sorted(kind._rule.core for kind in hb.optim.RULES)
GENERATED = {"src/hotbed/_core.pyi"}

# File → what to add, each before the text that follows it there.
TOY = {
    "csrc/kernels/rule.hpp": [
        ("  toy = 9,\n", "};\n\nconstexpr int kMaxStates"),
        (
            """    {.rule = Rule::toy,
     .name = "toy",
     .states = {{.name = "exp_avg"}}},
""",
            "};\n\n// The declaration of a rule.\n",
        ),
    ],
    "csrc/kernels/rules.inl": [
        (
            """template <class C>
struct Toy {
  static constexpr int kStates = 1;
  C lr;
  Blend<C> mean;
  explicit Toy(const RowUpdate& u) : lr(static_cast<C>(u.hyper.lr)), mean(u.hyper.beta1) {}
  HOTBED_INLINE C operator()(C w, C g, C& average, C&, C&) const {
    average = mean(average, g);
    return w - lr * average;
  }
};

""",
            "// Applies a column rule to one row.\n",
        ),
        (
            "    case Rule::toy: return run<Bind<coupled, Toy>::template Row>(u, range);\n",
            "    case Rule::rmsprop:\n      if (o.centered",
        ),
        ("    case Rule::toy: break;\n", "    case Rule::rmsprop:\n      if (o.momentum"),
    ],
    "src/hotbed/ops/gpu/rules.py": [
        ('    "toy": 1,\n', '    "rowwise_adagrad": 0,\n'),
        (
            """    elif name == "toy":
        found += [1 - h.beta1, h.beta1, h.beta1 > 0.5, h.lr]
""",
            "    return [float(number) for number in found]\n",
        ),
        (
            """    elif RULE == "toy":
        a = blend(a, g, numbers)
        w = w - single(numbers, 6) * a
""",
            '    elif RULE == "adadelta":\n',
        ),
    ],
    "src/hotbed/optim/moments.py": [
        ('__all__ += ["Toy"]\n\n', 'BETAS = Number("betas"'),
        (
            '''class Toy(TableOptimizer):
    """Steps by the mean of past gradients."""

    _rule = Rule(
        "toy",
        torch.optim.SGD,
        (LR, Number("beta", "[0, 1)", core=("beta1",)), *DECAY, MAXIMIZE),
        command="toy",
    )

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        beta: float = 0.9,
        weight_decay: float = 0.0,
        **options: Unpack[Coupled],
    ) -> None:
        super().__init__(params, arguments(locals()))


''',
            "class Adamax(TableOptimizer):\n",
        ),
        ("Coupled, ", "Stock, arguments\n"),
    ],
    "tests/optim/rule_oracles.py": [
        (
            """class DenseToy(DenseRule):
    def rule(self, w: Any, g: Any, state: dict[str, Any], lr: Any, t: int) -> Any:
        beta = w.dtype.type(self.hyper["beta1"])
        state["exp_avg"] = beta * state.get("exp_avg", 0 * w) + (1 - beta) * g
        return w - lr * state["exp_avg"]


""",
            "def _torch(",
        ),
    ],
}

PROGRAM = """
#include <cstdio>
#include "kernels/rules.inl"
#include "rules/history.hpp"
#include "rules/state_planes.hpp"
using namespace hotbed;
int main() {
  float weights[6] = {0, 1, 2, 3, 4, 5}, average[6] = {};
  const float gradient[3] = {1, -2, 0.5f};
  const int64_t slot = 1;
  RowUpdate u;
  u.options.rule = Rule::toy;
  u.hyper.lr = 0.25;
  u.hyper.beta1 = 0.75;
  u.weights = weights;
  u.dim = 3;
  u.states[0] = average;
  u.slots = &slot;
  u.grads = gradient;
  u.count = 1;
  for (u.step = 1; u.step <= 3; ++u.step) HOTBED_ISA::update_rows(u, 0, 1, nullptr);
  for (const StatePlane& plane : state_planes(u.options, 0)) std::puts(plane.name.c_str());
  std::puts(why_not_exact(u.options, u.hyper).c_str());
  for (float w : weights) std::printf("%a ", double(w));
}
"""


def added(root: Path) -> None:
    """Copies the sources to `root`, with the toy rule."""
    shutil.copytree(ROOT / "csrc", root / "csrc")
    for name, edits in TOY.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        for more, before in edits:
            assert text.count(before) == 1, (name, before)
            text = text.replace(before, more + before)
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"toy_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_new_rule_takes_five_files(tmp_path: Path) -> None:
    added(tmp_path)
    assert len(TOY) == 5
    toy: Any = loaded(tmp_path / "src/hotbed/optim/moments.py")
    assert "Toy" in toy.__all__ and toy.Toy._rule.command == "toy"
    shown = inspect.signature(toy.Toy).parameters
    assert shown["beta"].default == 0.9 and shown["untouched"].default == "lazy"
    with pytest.raises(hb.OptimizerError, match="Toy has no option l1"):
        toy.Toy(hb.Embedding(3, 2).parameters(), l1=1.0)
    with pytest.raises(
        TypeError, match="Toy.__init__.. got an unexpected keyword argument 'bogus'"
    ):
        toy.Toy(hb.Embedding(3, 2).parameters(), bogus=1.0)
    twin: Any = loaded(tmp_path / "src/hotbed/ops/gpu/rules.py")
    options: Any = SimpleNamespace(
        rule=SimpleNamespace(name="toy"), maximize=False, decoupled_weight_decay=False
    )
    hyper: Any = SimpleNamespace(lr=0.25, beta1=0.75, weight_decay=0.0)
    assert twin.numbers_of(options, hyper, 1) == [1.0, 0.0, 1.0, 0.25, 0.75, 1.0, 0.25]
    assert twin.rule_of(options, hyper) == "toy" and twin.COLUMN_RULES["toy"] == 1


@pytest.mark.process
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_core_has_a_new_rule(tmp_path: Path) -> None:
    added(tmp_path)
    (tmp_path / "program.cpp").write_text(PROGRAM)
    sources = ["program.cpp", "csrc/rules/state_planes.cpp", "csrc/rules/history.cpp"]
    flags = ["-std=c++20", "-ffp-contract=off", "-Wno-psabi", "-DHOTBED_ISA=base", "-Icsrc"]
    subprocess.run(["g++", *flags, *sources, "-o", "program"], cwd=tmp_path, check=True)
    run = subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=True)
    states, why, numbers = run.stdout.splitlines()
    assert states == "exp_avg" and "of the rule toy" in why
    oracle: Any = loaded(tmp_path / "tests/optim/rule_oracles.py")
    w, state = np.float32([[3, 4, 5]]), dict[str, Any]()
    rule = oracle.DenseToy([hb.Embedding(1, 1).weight], 0.25, {"beta1": 0.75}, 0.0)
    for t in range(1, 4):
        w = rule.rule(w, np.float32([[1, -2, 0.5]]), state, np.float32(0.25), t)
    assert [float.fromhex(x) for x in numbers.split()] == [0, 1, 2, *map(float, w[0])]


@pytest.mark.parametrize("rule", sorted({*RULES} - {"adam"}))  # which is the command line's default
def test_a_rule_is_named_in_no_other_file(rule: str) -> None:
    files = [p for top in ("csrc", "src/hotbed") for p in (ROOT / top).rglob("*.*")]
    named = {
        name
        for path in files
        if path.suffix in (".cpp", ".hpp", ".inl", ".py", ".pyi")
        and not (name := path.relative_to(ROOT).as_posix()).startswith("csrc/tests")
        and re.search(rf'Rule::{rule}\b|(?<!optimizer=)"{rule}"', path.read_text(encoding="utf-8"))
    } - GENERATED
    (declared,) = {n for n in named if n.startswith("src/hotbed/optim/")}
    assert named == {
        "csrc/kernels/rule.hpp",
        "csrc/kernels/rules.inl",
        "src/hotbed/ops/gpu/rules.py",
        declared,
    }
