"""The house rules that a reader relies on: imports go down only, heavy libraries stay where they belong."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# a module may import its own level only within its package, and whatever stands on lower levels
LEVELS = [
    {"errors", "log"},
    {"tokens", "metrics", "sites", "run", "bootstrap", "hf", "reference"},
    {"plots"},
    {"report"},
    {"architectures", "checkpoint", "checkpoint_folder", "v1"},
    {"interventions", "accumulators", "gate_sums", "stream", "training", "reading"},
    {"carried", "efficiency", "evaluation"},
    {"sae"},
    {"analyses"},
    {"cli"},
]
# what stands beside its own level: written down here or not allowed
WITHIN = {
    "accumulators": {"interventions"},
    "gate_sums": {"accumulators"},
    "stream": {"accumulators", "interventions"},
    "reading": {"stream"},
    "checkpoint": {"architectures", "checkpoint_folder", "v1"},
    "v1": {"architectures"},
    "tokens": {"training"},  # reading documents of every kind; imported where it is needed, not at the top
}
FILES = sorted(p for folder in ("satlens", "analyses", "sae") for p in (ROOT / folder).rglob("*.py"))


def unit(module: str) -> str | None:
    """The part of the project a module belongs to: its level's name."""
    parts = module.split(".")
    if parts[0] in ("analyses", "sae"):
        return parts[0]
    return parts[1] if parts[0] == "satlens" and len(parts) > 1 else None


def imported(path: Path) -> list[str]:
    """Every module a file imports, at its top or inside a function."""
    out = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            out += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            out += [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
    return out


def own_unit(path: Path) -> str | None:
    return unit(".".join(path.relative_to(ROOT).with_suffix("").parts))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down_only(path):
    level = {name: i for i, names in enumerate(LEVELS) for name in names}
    own = own_unit(path)
    for module in imported(path):
        other = unit(module)
        if other in (None, own) or other not in level or own not in level:
            continue
        allowed = level[other] < level[own] or other in WITHIN.get(own, ())
        assert allowed, f"{path.name} ({own}) imports {module} ({other})"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_heavy_libraries_stay_where_they_belong(path):
    own, top = own_unit(path), {module.split(".")[0] for module in imported(path)}
    if "transformer_lens" in top:
        assert own in ("architectures", "checkpoint") or path.match("carried/opening.py")
    if own in ("plots", "report", "bootstrap", "run") or path.parent.name == "figures":
        assert "torch" not in top


def test_analyses_import_each_other_only_in_the_suite_that_composes_them():
    verbs = {
        path.stem for path in (ROOT / "analyses").glob("*.py")
    }  # folders hold what analyses are made with
    for path in (ROOT / "analyses").rglob("*.py"):
        others = {m.split(".")[1] for m in imported(path) if m.startswith("analyses.")} & verbs - {path.stem}
        is_suite = path == ROOT / "analyses" / "suite.py"
        assert is_suite or not others, f"{path.name} imports {others}"


@pytest.mark.parametrize(
    "module", ["satlens", "satlens.cli", "satlens.report", "satlens.run", "analyses.figures.gates"]
)
def test_importing_what_needs_no_model_does_not_import_torch(module):
    script = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_opens_with_a_sentence_and_can_be_read_in_one_sitting(path):
    text = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text)), "no docstring"
    assert len(text.splitlines()) <= 400
