"""Finds the repeated blocks of a model, such as transformer layers: the units that other techniques work on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from lightning_accel.core.checks import SettingError, nearest

_LISTS = (nn.ModuleList, nn.ModuleDict)
_HOLLOW = ("torch", "lightning", "pytorch_lightning")  # their base classes have an empty forward


def find_blocks(model: nn.Module, wanted: Sequence[str] = ()) -> dict[str, nn.Module]:
    """Returns the blocks of ``model`` as site → module. No block contains another.

    Args:
        model: Any module.
        wanted: Class names or module paths. If empty, :func:`repeated_blocks` finds the blocks.

    Raises:
        ValueError: One of ``wanted`` matches nothing. The error names the nearest class or path.
    """
    if not wanted:
        return repeated_blocks(model)
    modules = {name: module for name, module in model.named_modules() if name}
    found: dict[str, nn.Module] = {}
    for want in wanted:
        matches = {n: m for n, m in modules.items() if n == want or type(m).__name__ == want}
        if not matches:
            known = [*dict.fromkeys(type(m).__name__ for m in modules.values() if not _is_leaf(m)), *modules]
            raise SettingError(  # the user's mistake, not a technique's failure
                f"No block matches {want!r}{nearest(want, known) or '.'} "
                f"Blocks are class names or module paths; this model has, among others: {', '.join(known[:8])}."
            )
        found.update(matches)
    return _outermost(found)


def called_children(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields children by name. Of module lists and dicts, which are never called, yields their contents."""
    for name, child in module.named_children():
        if isinstance(child, _LISTS):
            yield from called_children(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def units(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the repeated blocks of ``model`` and its other modules of several layers: site → module, none nested.

    The other modules are, for example, a stem, a head or a multilayer perceptron. A model that is itself such a module
    is returned as site ``""``.
    """
    blocks = repeated_blocks(model)
    found: dict[str, nn.Module] = {}

    def visit(site: str, module: nn.Module) -> None:
        inside = f"{site}." if site else ""
        if site in blocks or (_is_unit(module) and not any(block.startswith(inside) for block in blocks)):
            if module not in found.values():
                found[site] = module
        else:
            for name, child in module.named_children():
                visit(inside + name, child)

    visit("", model)
    return found


def _is_unit(module: nn.Module) -> bool:
    """Returns whether a module holds several layers, one of them with weights, and is itself called."""
    if _is_leaf(module) or type(module) in _LISTS:
        return False
    # A LightningModule computes in its steps. If it has no forward of its own, nobody calls forward.
    if hasattr(module, "training_step") and type(module).forward.__module__.partition(".")[0] in _HOLLOW:
        return False
    # Modules in a ModuleList are called by the module that holds the list.
    parts = [part for child in module.children() for part in (child.children() if type(child) in _LISTS else (child,))]
    if not all(map(_is_leaf, parts)):
        return False
    return _leaves(module) > 1 and any(p.dim() > 1 for p in module.parameters())


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules whose class occurs at least twice in ``model``, at the nesting level of the lowest cost.

    Transformers nest heads in layers in towers. The cost of a level, in leaf modules, is the number of blocks plus the
    largest block plus everything outside of blocks. It estimates the memory that remains when each block is
    checkpointed (Chen et al., 2016, https://arxiv.org/abs/1604.06174).
    """
    candidates = _repeated(model)
    leaves = _leaves(model)
    level = _outermost(candidates)
    best: dict[str, nn.Module] = {}
    best_cost = leaves
    while level:
        sizes = [_leaves(module) for module in level.values()]
        cost = len(sizes) + max(sizes) + leaves - sum(sizes)
        if not best or cost < best_cost:
            best, best_cost = level, cost
        finer: dict[str, nn.Module] = {}
        for name, module in level.items():
            inner = _outermost({n: m for n, m in candidates.items() if n.startswith(f"{name}.")})
            finer |= inner if len(inner) > 1 else {name: module}
        level = finer if finer.keys() != level.keys() else {}
    return best


def _repeated(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the composite modules whose kind occurs twice, or that one parent holds twice (shared modules)."""
    composite = {n: m for n, m in model.named_modules() if n and not _is_leaf(m) and type(m) not in _LISTS}
    kinds = Counter(_kind(m) for m in composite.values())
    holders = Counter(
        (name.rpartition(".")[0], id(module)) for name, module in model.named_modules(remove_duplicate=False)
    )
    shared = {module for (_, module), count in holders.items() if count > 1}
    return {n: m for n, m in composite.items() if kinds[_kind(m)] > 1 or id(m) in shared}


def _kind(module: nn.Module) -> tuple[object, ...]:
    # All Sequentials have the same class. Those with the same types of layers are of one kind.
    is_container = isinstance(module, (nn.Sequential, *_LISTS))
    return (type(module), *(map(type, module.children()) if is_container else ()))


def _outermost(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    return {n: m for n, m in modules.items() if not any(n.startswith(f"{other}.") for other in modules)}


def _leaves(module: nn.Module) -> int:
    return sum(map(_is_leaf, module.modules()))


def _is_leaf(module: nn.Module) -> bool:
    # Not `any(module.children())`: bool() calls a module's len(), which fails on the result of torch.compile().
    return next(module.children(), None) is None
