"""One file reads clocks; whoever wants to know how long something took asks the timeline, or times a call."""

from __future__ import annotations

import ast

from support.source_tree import library

CLOCKS = "core/clocks.py"

NO_TIMING = {
    "callbacks/_epoch_ends.py": {"sleep"},
    "resilience/lost_ranks.py": {"sleep", "time"},  # which it compares with the dates of files
}
"""What files take from ``time`` beside it."""

TIME_ONE_THING = {
    "callbacks/_phase_sampler.py": "what a step that is looked at takes the host, and the processor time of a fetch",
    "cli/bench_runs.py": "a whole run",
    "core/compiled.py": "a compilation",
    "core/heap.py": "pages that the system clears, where torch is not imported",
    "core/torch_private/training.py": "the loading of one batch's samples",
    "data/grouped_loader.py": "a pass over a dataset",
    "data/tuned_loader.py": "the first fetch, with the start of workers",
    "data/pipeline_iteration.py": "fetches and preparations, of which a thread beside the training has many",
    "deploy/candidates.py": "the loading of a file, and a first call",
    "experiment/python_pace.py": "a little Python, by processor time",
    "experiment/time_calls.py": "calls",
    "experiment/trial_runs.py": "what a trial costs the purse",
    "memory/planner.py": "a step between two synchronisations",
    "search/toy_training.py": "turns of a process on trial",
    "search/worker.py": "the start of a process",
    "techniques/arms.py": "the step in which an arm is set up",
    "techniques/compilation.py": "compilations, in a step of their own",
}
"""Who has a stopwatch, and what for."""

PAY = {"callbacks/_instruments.py", "core/purse.py", "lightning/plugin.py", "lightning/run.py"}
"""Who asks what time it is, to pay for what was done."""

MARK = {"evidence/op_profiler.py": "operations", "lightning/plain_steps.py": "the end of a step, told later"}
"""Who marks instants beside the timeline, and of what."""


def test_one_file_reads_clocks_and_timing_events() -> None:
    found: dict[str, set[str]] = {}
    for file, tree in library().trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "time":
                found.setdefault(file, set()).update(alias.name for alias in node.names)
            elif (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time") or (
                isinstance(node, ast.Attribute) and node.attr == "elapsed_time"
            ):
                found.setdefault(file, set()).add(node.attr)
            elif isinstance(node, ast.keyword) and node.arg == "enable_timing":
                found.setdefault(file, set()).add(node.arg)
    assert {file: names for file, names in found.items() if file != CLOCKS} == NO_TIMING


def test_nobody_takes_a_clock_out_of_that_file() -> None:
    names = {"perf_counter", "perf_counter_ns", "monotonic", "thread_time"}
    assert not [one for one in library().imports if one.target == CLOCKS and one.name in names | {""}]


def test_it_is_known_who_times_what_is_no_step() -> None:
    taken: dict[str, set[str]] = {"Stopwatch": set(), "seconds": set()}
    for one in library().imports:
        if one.target == CLOCKS and one.name in taken:
            taken[one.name].add(one.file)
    assert taken == {"Stopwatch": TIME_ONE_THING.keys(), "seconds": PAY}
    marks = {
        file
        for file, tree in library().trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "mark"
        if "clock" in ast.unparse(node.func.value)
    }
    assert marks - {CLOCKS} == MARK.keys()
