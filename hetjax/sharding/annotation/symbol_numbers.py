"""What the symbols of annotations stand for, by the sizes of the arrays that they are of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetjax.errors import InputError, check_count
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.annotation.symbols import Size, SymbolicSize


def numbers_of(
    annotations: Sequence[HSharding | None],
    shapes: Sequence[Sequence[int]],
    symbols: Mapping[str, int],
) -> dict[str, int]:
    """What symbols stand for, by the sizes of arrays.

    Args:
        annotations: how each array lies.
        shapes: the arrays' shapes.
        symbols: numbers that are known already.

    Returns:
        A number for each symbol of the annotations.

    Raises:
        InputError: a symbol does not follow from the sizes, no number fits, or one is none.

    Example:
        >>> from jax.sharding import PartitionSpec
        >>> from hetjax.sharding import Subgroup
        >>> groups = tuple(Subgroup((device,), (), PartitionSpec()) for device in (0, 1))
        >>> numbers_of([HSharding(groups, 0, ("3*(tokens//4)", "tokens//4"))], [(16,)], {})
        {'tokens': 16}
    """
    for name, number in symbols.items():
        check_count(f"symbols[{name!r}]", number)
    numbers = dict(symbols)
    equations = [
        (annotation.sizes, shape[annotation.hdim])
        for annotation, shape in zip(annotations, shapes, strict=True)
        if annotation is not None
        and isinstance(annotation.hdim, int)
        and annotation.symbols
        and annotation.hdim < len(shape)
    ]
    while True:
        unknown = [({n for s in sizes for n in _names(s)} - set(numbers)) for sizes, _ in equations]
        ready = next((i for i, names in enumerate(unknown) if len(names) == 1), None)
        if ready is None:
            break
        (name,), (sizes, total) = unknown[ready], equations[ready]
        numbers[name] = _solved(name, sizes, total, numbers)
    missing = sorted(set().union(*unknown)) if equations else []
    if missing:
        raise InputError(
            f"symbols: {missing} do not follow from the inputs' sizes; give them as symbols="
        )
    return numbers


def _names(size: Size | str) -> frozenset[str]:
    return size.names if isinstance(size, SymbolicSize) else frozenset()


def _solved(name: str, sizes: Sequence[Size | str], total: int, known: Mapping[str, int]) -> int:
    """The largest number of a symbol by which sizes make up a dimension."""
    for number in range(total, 0, -1):
        try:
            values = {**known, name: number}
            found = sum(s.bind(values) if isinstance(s, SymbolicSize) else int(s) for s in sizes)
        except InputError:
            continue
        if found == total:
            return number
    raise InputError(
        f"symbols: no number of {name!r} of 1 or more makes {', '.join(map(str, sizes))} add up "
        f"to {total}"
    )
