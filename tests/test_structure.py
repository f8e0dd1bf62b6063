"""The library's layers: imports point down, none goes in a circle, and private names of others stay in their files.

All imports count alike: at the top of a file, under ``TYPE_CHECKING``, inside a function. The one exception is the
package's own ``__init__``, whose public names stand above everything.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from support.source_tree import Import, SourceTree, circles, library

LAYERS = (
    ("core",),
    ("step",),
    ("experiment",),
    ("ops",),
    ("memory",),
    ("data",),
    ("techniques",),
    ("arguments.py", "settings.py"),
    ("technique_run.py",),
    ("trial_steps.py",),
    ("engine.py",),
    ("tuning",),
    ("evidence", "deploy"),
    ("assembly.py",),
    ("lightning/packages.py",),
    ("lightning/private.py",),
    ("resilience",),
    ("callbacks",),
    ("lightning",),
    ("strategies",),
    ("search",),
    ("cli",),
    ("registration.py",),
    ("__main__.py", "__init__.py"),
)
"""From the bottom up. A part imports those below it; the files of one part import each other, in no circle."""

ONLY = {
    "experiment": {"core", "step"},
    "lightning/private.py": {"core", "step", "lightning/packages.py"},
    "resilience": {"core", "experiment", "lightning/packages.py", "lightning/private.py"},
}
"""Parts that may import only these."""

KNOW_LIGHTNING = {
    "lightning/packages.py",
    "lightning/private.py",
    "resilience",
    "callbacks",
    "lightning",
    "strategies",
    "search",
    "cli",
}
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}

PRIVATE_NAMES_LIVE_IN = ("core/torch_private/", "lightning/private.py")
TRANSFORMERS_PRIVATE_NAMES_LIVE_IN = "techniques/flash_attention/huggingface_interface.py"
MOST_PRIVATE_NAMES = 54
NOT_COUNTED = {
    "_C": "the way to others",
    "_raw_saved_result": "documented: https://docs.pytorch.org/docs/stable/notes/autograd.html#saved-tensors",
    "_saved_result": "documented: https://docs.pytorch.org/docs/stable/notes/autograd.html#saved-tensors",
    "_python_dispatch": "documented: https://docs.pytorch.org/docs/stable/notes/extending.html",
    "_record_memory_history": "documented: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html",
    "_snapshot": "documented: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html",
    "_init_weights": "of transformers",
    "_internal": "of torch_xla",
    "_actions": "of argparse",
}


# -- the rules, each as (violation, message with file, line and rule) -----------------------------------------------


def part_of(file: str) -> str:
    """The part of the library that a file belongs to: its folder, or itself at the top level."""
    return file if file in ("lightning/packages.py", "lightning/private.py") else file.partition("/")[0]


def levels() -> dict[str, int]:
    return {part: level for level, parts in enumerate(LAYERS) for part in parts}


def upward_imports(tree: SourceTree) -> Iterator[tuple[str, str]]:
    level = levels()
    for found in tree.imports:
        here, there = part_of(found.file), part_of(found.target)
        if not found.target or here == there:
            continue
        rule = ""
        if level[there] > level[here]:
            rule = f"{there} is above {here}: imports point down"
        elif there not in ONLY.get(here, {there}):
            rule = f"{here} may import {' and '.join(sorted(ONLY[here]))} only"
        elif here == "data" and there == "settings.py":
            rule = "data does not know the settings"
        if rule:
            yield f"{found.file} imports {found.target}", f"{at(found)} imports {found.target}: {rule}"


def imports_between_techniques(tree: SourceTree) -> Iterator[tuple[str, str]]:
    owners = {technique_of(file) for file, source in tree.trees.items() if defines_a_technique(file, source)}
    for found in tree.imports:
        here, there = technique_of(found.file), technique_of(found.target)
        if here != there and here in owners and there in owners:
            rule = "techniques never import each other"
            yield f"{found.file} imports {found.target}", f"{at(found)} imports {found.target}: {rule}"


def technique_of(file: str) -> str:
    return "/".join(file.split("/")[:2]) if file.startswith("techniques/") else ""


def defines_a_technique(file: str, source: ast.Module) -> bool:
    classes = [node for node in ast.walk(source) if isinstance(node, ast.ClassDef)]
    return bool(technique_of(file)) and any(
        isinstance(base, ast.Name) and base.id == "Technique" for node in classes for base in node.bases
    )


def imports_of_lightning(tree: SourceTree) -> Iterator[tuple[str, str]]:
    for found in tree.imports:
        if found.module.partition(".")[0] in LIGHTNING and part_of(found.file) not in KNOW_LIGHTNING:
            rule = "only lightning/, strategies/, callbacks/, cli/ and resilience/ know Lightning"
            yield f"{found.file} imports Lightning", f"{at(found)} imports {found.module}: {rule}"


def circles_of_files(tree: SourceTree) -> Iterator[tuple[str, str]]:
    for files in circles(tree.arrows):
        yield f"circle of {', '.join(files)}", f"these files import each other in a circle: {described(tree, files)}"


def circles_of_parts(tree: SourceTree) -> Iterator[tuple[str, str]]:
    arrows: dict[str, set[str]] = {part_of(file): set() for file in tree.trees}
    for file, targets in tree.arrows.items():
        arrows[part_of(file)] |= {part_of(target) for target in targets} - {part_of(file)}
    for parts in circles(arrows):
        between = [f for f in tree.imports if f.target and {part_of(f.file), part_of(f.target)} <= set(parts)]
        lines = [f"{at(f)} imports {f.target}" for f in between if part_of(f.file) != part_of(f.target)]
        yield f"circle of {', '.join(parts)}", f"these parts import each other in a circle: {'; '.join(lines)}"


def private_names_elsewhere(tree: SourceTree) -> Iterator[tuple[str, str]]:
    for found in tree.private_names():
        if found.file.startswith((*PRIVATE_NAMES_LIVE_IN, TRANSFORMERS_PRIVATE_NAMES_LIVE_IN)):
            continue
        rule = f"private names of other libraries live in {' and '.join(PRIVATE_NAMES_LIVE_IN)}"
        yield f"{found.file} uses {found.name}", f"{found.file}:{found.line} uses {found.name}: {rule}"


def at(found: Import) -> str:
    return f"{found.file}:{found.line}"


def described(tree: SourceTree, files: list[str]) -> str:
    return "; ".join(f"{at(f)} → {f.target}" for f in tree.imports if f.file in files and f.target in files)


Rule = Callable[[SourceTree], Iterator[tuple[str, str]]]
RULES: tuple[Rule, ...] = (
    *(upward_imports, imports_between_techniques, imports_of_lightning),
    *(circles_of_files, circles_of_parts, private_names_elsewhere),
)


# -- the library keeps them ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_the_library_keeps(rule: Rule) -> None:
    wrong = [message for _, message in rule(library())]
    assert not wrong, "\n".join(wrong)


def test_every_part_has_a_layer() -> None:
    assert {part_of(file) for file in library().trees} == set(levels())


def test_private_names_of_torch_and_lightning_are_few() -> None:
    here = [found for found in library().private_names() if found.file.startswith(PRIVATE_NAMES_LIVE_IN)]
    names = {last_private(found.name) for found in here}
    counted = sorted(names - set(NOT_COUNTED))
    assert len(counted) <= MOST_PRIVATE_NAMES, "\n".join(counted)
    assert not set(NOT_COUNTED) - names, "no longer used"


def test_no_two_files_have_one_name() -> None:
    """But for a technique's folder, whose files are called alike, and private names, whose files are as torch's are."""
    files = [file for file in library().trees if not file.startswith(PRIVATE_NAMES_LIVE_IN)]
    counts = Counter(file.rpartition("/")[2] for file in files)
    assert {name for name, count in counts.items() if count > 1} <= {"__init__.py", "settings.py", "technique.py"}


def test_no_two_classes_have_one_name() -> None:
    classes = Counter(
        node.name for tree in library().trees.values() for node in tree.body if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in classes.items() if count > 1] == []


def last_private(name: str) -> str:
    """``_version`` of ``torch._C._version`` and of ``"_version"``: the ways to a name are the same name."""
    return [part for part in name.strip('"').split(".") if part.startswith("_")][-1]


# -- the rules find what they are for ------------------------------------------------------------------------------


GOOD = {
    "core/patch.py": "import torch",
    "core/trial.py": "from lightning_accel.core import patch",
    "techniques/base.py": "class Technique: ...",
    "engine.py": "from lightning_accel.core.patch import Patch\nfrom lightning_accel.techniques.base import Technique",
    "lightning/private.py": "def loop(trainer): return trainer._loop",
    "resilience/atomic.py": "from lightning_accel.lightning.private import loop",
}

BAD = {
    "an arrow up, by type only": (
        {"core/patch.py": "if TYPE_CHECKING:\n    from lightning_accel.engine import Engine"},
        "core/patch.py:2 imports engine.py: engine.py is above core: imports point down",
    ),
    "an arrow up, in a function": (
        {"core/patch.py": "def f():\n    import lightning_accel.engine"},
        "core/patch.py:2 imports engine.py: engine.py is above core: imports point down",
    ),
    "more than a part may import": (
        {"resilience/atomic.py": "from lightning_accel.engine import Engine"},
        "resilience/atomic.py:1 imports engine.py: resilience may import core and experiment and"
        " lightning/packages.py and lightning/private.py only",
    ),
    "a circle of files": (
        {"core/patch.py": "from lightning_accel.core.trial import Trial"},
        "these files import each other in a circle: core/patch.py:1 → core/trial.py; core/trial.py:1 → core/patch.py",
    ),
    "a circle of parts": (
        {"core/other.py": "from lightning_accel.engine import Engine"},
        "these parts import each other in a circle: engine.py:1 imports core/patch.py; core/other.py:1 imports"
        " engine.py",
    ),
    "techniques that import each other": (
        {
            "techniques/a.py": "class A(Technique): ...",
            "techniques/b/b.py": "from lightning_accel.techniques.a import A\nclass B(Technique): ...",
        },
        "techniques/b/b.py:1 imports techniques/a.py: techniques never import each other",
    ),
    "Lightning below": (
        {"engine.py": "import lightning.pytorch"},
        "engine.py:1 imports lightning.pytorch: only lightning/, strategies/, callbacks/, cli/ and resilience/ know"
        " Lightning",
    ),
    "a private function": ({"engine.py": "torch._C._version()"}, "engine.py:1 uses torch._C._version: "),
    "a private attribute": ({"engine.py": "def f(t): return t.x._base"}, "engine.py:1 uses ._base: "),
    "a private attribute by its name": ({"engine.py": "getattr(t, '_base')"}, 'engine.py:1 uses "_base": '),
    "an import of a private name": ({"engine.py": "from torch.nn import _x"}, "engine.py:1 uses torch.nn._x: "),
    "an import out of a private module": ({"engine.py": "from torch._x import y"}, "engine.py:1 uses torch._x.y: "),
    "a private name that another file of ours has too": (
        {"core/a.py": "class A:\n    def f(self): self._buffers = 1", "engine.py": "def f(m): return m._buffers"},
        "engine.py:1 uses ._buffers: ",
    ),
}


def found_in(sources: dict[str, str]) -> list[str]:
    tree = SourceTree({**GOOD, **sources}, frozenset({"_buffers"}))
    return [message for rule in RULES for _, message in rule(tree)]


def test_what_keeps_the_rules_is_not_complained_of() -> None:
    ours = {
        "core/names.py": "def f(name): return name.endswith('_as')",
        "core/own.py": "class Own:\n    def f(self, other):\n        self._x = 1\n        return other._x, '_x'",
        "engine.py": "import sys\nframe, fields = sys._getframe(), Point._fields",
    }
    assert found_in(ours) == []


@pytest.mark.parametrize(("sources", "message"), BAD.values(), ids=BAD)
def test_a_breach_is_named_with_file_line_and_rule(sources: dict[str, str], message: str) -> None:
    assert any(found.startswith(message) for found in found_in(sources)), found_in(sources)
