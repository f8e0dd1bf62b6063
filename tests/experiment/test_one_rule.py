"""One package compares times: nobody else draws coins, says which of two times is less, or takes turns by himself."""

from __future__ import annotations

import ast
import re

from support.source_tree import library

KIT = "experiment/"

PROOFS = {
    "deploy/form_latency.py": "calls of a model in several forms",
    "search/heap_trial.py": "steps under several allocators",
    "search/judging.py": "blocks of steps of two setups",
    "search/setup_runs.py": "blocks of steps of two setups",
    "tuning/comparison.py": "steps of a run",
    "tuning/trial_scheduler.py": "steps of a run",
}
"""Who proves that something is faster, and by what."""

SCREENS = {
    "data/worker_schedule.py": "epochs of a loader",
    "ops/determinant.py": "ways to a determinant",
    "techniques/activation_offloading.py": "how far ahead tensors are brought back",
    "techniques/flash_attention/backend_trial.py": "attentions of a site, by each backend",
    "techniques/float8.py": "a linear layer",
    "techniques/layout_trial.py": "operations of a step",
    "tuning/trial_scheduler.py": "steps that have come to take longer",
    "tuning/trial_budget.py": "what a step takes, to tell seconds from turns",
}
"""Who screens, and what."""

ORDERS = {
    "cli/bench_runs.py": "runs of two revisions",
    "search/heap_trial.py": "steps under two allocators",
    "search/judging.py": "blocks of two setups",
    "techniques/activation_offloading.py": "steps with several depths",
    "tuning/comparison.py": "steps of two sides",
    "tuning/trial_scheduler.py": "steps of two sides",
}
"""Who has sides take turns by the coin, beside the calls that the kit itself times."""

DRAW = {
    "callbacks/_phase_sampler.py": "which steps are looked at",
    "callbacks/_allowance.py": "for how long it rests",
    "core/random_streams.py": "nothing: it knows the streams of the user",
}
"""Who else imports ``random``, and what it draws."""

MIDDLES = {
    "core/purse.py": "what a plain step takes",
    "data/tuned_loader.py": "the share of an epoch that waits",
    "memory/packer.py": "what a step takes, of which packing may add a tenth",
    "memory/packing_budget.py": "what a packing takes",
    "memory/planner.py": "what a step takes, for the report",
    "memory/pressure.py": "what a step takes, for the report",
    "tuning/comparison.py": "what turns have cost, for the budget",
}
"""Who takes a median or a mean below the reports, and of what: none decides which of two is faster."""

PRICES = {
    "lightning/met_programs.py": "what it takes to begin, with what the run may pay",
    "lightning/plain_start.py": "what a technique takes to begin, with what the run may pay",
    "lightning/plain_steps.py": "what a changed step takes more, with what the run may pay",
    "lightning/run.py": "what a look takes, with what the run may pay",
    "tuning/trial_scheduler.py": "what an arm may gain, with a share of a step",
}
"""Who compares a time with so much of another one, and which: no two ways to do the same."""

SHOWN = (
    "callbacks/",
    "claims/",
    "cli/",
    "deploy/",
    "evidence/",
)  # there numbers are shown, and decide nothing in a run

TIME = re.compile(r"(^|_)(s|ms|seconds)$")


def users_of(*names: str) -> set[str]:
    found = {(one.file, one.name) for one in library().imports if one.target.startswith(KIT)}
    return {file for file, name in found if name in names and not file.startswith(KIT)}


def test_it_is_known_who_compares_what() -> None:
    assert users_of("PairTest") == PROOFS.keys()
    assert users_of("screen", "fastest", "LatestTimes") == SCREENS.keys()
    assert users_of("Schedule") == ORDERS.keys()


def test_one_class_draws_coins() -> None:
    draw = {one.file for one in library().imports if one.module == "random"}
    assert draw == DRAW.keys() | {f"{KIT}pair_schedule.py"}


def test_it_is_known_who_takes_a_median_of_times() -> None:
    taken = {one.file for one in library().imports if one.module == "statistics"}
    assert {file for file in taken if not file.startswith((*SHOWN, KIT))} == MIDDLES.keys()


def test_nobody_else_says_which_of_two_times_is_less() -> None:
    """A factor on one of two times that are compared would be a rule of "faster"."""
    found = {
        file
        for file, tree in library().trees.items()
        if not file.startswith((*SHOWN, KIT))
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and all(map(is_a_time, (node.left, *node.comparators)))
        if any(isinstance(one, ast.Mult) for one in ast.walk(node))
    }
    assert found == PRICES.keys()


def is_a_time(node: ast.expr) -> bool:
    names = {getattr(one, "id", None) or getattr(one, "attr", "") for one in ast.walk(node)}
    return any(TIME.search(name) for name in names)
