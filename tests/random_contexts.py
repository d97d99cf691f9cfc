"""Random context splits, for tests."""

from random import Random

from hetjax.sharding.context.context_split import ContextGroup, ContextSplit


def random_parts(rng: Random, total: int, count: int) -> list[int]:
    """A total in so many parts, some of them often 0."""
    marks = sorted(rng.choice([0, total, rng.randint(0, total)]) for _ in range(count - 1))
    return [b - a for a, b in zip([0, *marks], [*marks, total], strict=True)]


def random_context(rng: Random, max_groups: int = 4, *, is_mirrored: bool = True) -> ContextSplit:
    """Groups of one to four devices with tokens and heads of any sizes."""
    key_value_heads = rng.randint(1, 3)
    query_heads = key_value_heads * rng.randint(1, 4)
    devices = list(range(20))
    rng.shuffle(devices)
    groups = []
    for _ in range(rng.randint(1, max_groups)):
        own = tuple(devices.pop() for _ in range(rng.randint(1, 4)))
        length = rng.randint(1, 9)
        counts = random_parts(rng, query_heads, len(own))
        order = list(range(len(own)))
        rng.shuffle(order)
        heads, at = [(0, 0)] * len(own), 0
        for place in order:
            heads[place] = (at, at + counts[place])
            at += counts[place]
        groups.append(ContextGroup(own, tuple(random_parts(rng, length, len(own))), tuple(heads)))
    length = sum(group.length for group in groups)
    return ContextSplit(length, query_heads, key_value_heads, tuple(groups), is_mirrored)
