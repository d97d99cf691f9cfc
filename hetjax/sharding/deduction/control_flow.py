"""Deduction of scans, loops and conditionals: their bodies, and what goes round in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hetjax import _compat
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.deduction.annotated_program import AnnotatedProgram, Compute, Taken
from hetjax.sharding.deduction.bottom_tier import ELSEWHERE, OperandError
from hetjax.sharding.deduction.signature import shapes_of
from hetjax.sharding.deduction.top_tier import WHOLE, TopTier, row_of, shared, take, top_tier_of

HeldAnnotations = Sequence[HSharding | None]
Bodies = tuple[AnnotatedProgram, ...]
Body = Callable[[_compat.ClosedJaxpr, HeldAnnotations], AnnotatedProgram]


def deduce_control(
    node: Compute, held: HeldAnnotations, body: Body
) -> tuple[Compute, list[TopTier]]:
    """Deduce a scan, a loop or a conditional.

    Args:
        node: the equation, on the union of its operands.
        held: how its operands lie.
        body: deduces a jaxpr inside it, given how its inputs lie.

    Returns:
        The equation with its bodies, and the top tier of each result.

    Raises:
        OperandError: the operands cannot be taken so.
    """
    for place, annotation in enumerate(held):
        if annotation is not None and annotation.ranges:
            raise OperandError(place, "submeshes have ranges of several of its dimensions")
    match node.equation.primitive.name:
        case "scan":
            return _scan(node, held, body)
        case "while":
            return _while(node, held, body)
    return _conditional(node, held, body)


def _scan(node: Compute, held: HeldAnnotations, body: Body) -> tuple[Compute, list[TopTier]]:
    params = node.equation.params
    first, count = _compat.scan_sizes(params)
    rows = []
    for place, annotation in enumerate(held[first + count :], first + count):
        if annotation is not None and annotation.hdim == 0:
            raise OperandError(place, "the scan goes over the dimension that is divided")
        rows.append(None if annotation is None else row_of(annotation))

    def bodies(carry: HeldAnnotations) -> Bodies:
        return (body(params["jaxpr"], [*held[:first], *carry, *rows]),)

    found, tops = _carried(node, held[first : first + count], first, bodies)
    stacked = [
        replace(top, hdim=top.hdim + 1) if isinstance(top.hdim, int) else top
        for top in tops[count:]
    ]
    return found, [*tops[:count], *stacked]


def _while(node: Compute, held: HeldAnnotations, body: Body) -> tuple[Compute, list[TopTier]]:
    params = node.equation.params
    first = params["cond_nconsts"]
    second = first + params["body_nconsts"]

    def bodies(carry: HeldAnnotations) -> Bodies:
        condition = body(params["cond_jaxpr"], [*held[:first], *carry])
        return condition, body(params["body_jaxpr"], [*held[first:second], *carry])

    def after(found: Bodies, before: Sequence[TopTier]) -> list[TopTier]:
        (going,), made = (_tops(each) for each in found)
        if not isinstance(going.hdim, int):
            return made
        return [
            going if top == WHOLE == held_before else top
            for top, held_before in zip(made, before, strict=True)
        ]

    found, tops = _carried(node, held[second:], second, bodies, after)
    _check_going(found.bodies[0], tops)
    return found, tops


def _check_going(condition: AnnotatedProgram, carried: Sequence[TopTier]) -> None:
    """Check that every submesh knows whether what it carries goes on.

    A loop that JAX has batched asks for each example, whose elements of what is carried, all of
    them, go on or stay; so submeshes may share examples.
    """
    (going,), (value,) = _tops(condition), condition.outputs
    num_asked = len(condition.shapes[value].shape)
    if going != WHOLE and not isinstance(going.hdim, int):
        raise OperandError(ELSEWHERE, "whether a loop goes on must be known to every submesh")
    for top in carried:
        shares_asked = isinstance(top.hdim, int) and top.hdim < num_asked
        if (top != going) if going != WHOLE else shares_asked:
            raise OperandError(
                ELSEWHERE, "submeshes share examples, of which they do not know whether they go on"
            )


def _carried(
    node: Compute,
    held: HeldAnnotations,
    first: int,
    bodies: Callable[[HeldAnnotations], Bodies],
    after: Callable[[Bodies, Sequence[TopTier]], list[TopTier]] = lambda found, _: _tops(found[-1]),
) -> tuple[Compute, list[TopTier]]:
    """A body whose first results are operands of its next iteration.

    An operand that every submesh has whole becomes what the body makes of it, a part or a summand;
    any other one must stay as it is.
    """
    carry = [annotation or HSharding(node.union) for annotation in held] if node.union else held
    carry = list(carry)
    shapes = shapes_of(node.equation.invars[first : first + len(carry)])
    taken: dict[int, Taken] = {}
    while True:
        found = bodies(carry)
        before = [top_tier_of(*pair) for pair in zip(carry, shapes, strict=True)]
        tops = after(found, before)
        unlike = [i for i, top in enumerate(before) if tops[i] != top]
        if not unlike:
            return replace(node, bodies=found, taken=taken), tops
        for i in unlike:
            annotation = carry[i]
            if before[i] != WHOLE or annotation is None:
                raise OperandError(ELSEWHERE, "an iteration leaves a value in another way")
            taken[first + i] = take(tops[i])
            carry[i] = shared(annotation, tops[i])


def _conditional(node: Compute, held: HeldAnnotations, body: Body) -> tuple[Compute, list[TopTier]]:
    if top_tier_of(held[0], ()) != WHOLE:
        raise OperandError(0, "submeshes must take the same branch")
    bodies = tuple(body(branch, held[1:]) for branch in node.equation.params["branches"])
    first, *others = (_tops(each) for each in bodies)
    if any(tops != first for tops in others):
        raise OperandError(ELSEWHERE, "branches leave their results in unlike ways")
    return replace(node, bodies=bodies), first


def _tops(body: AnnotatedProgram) -> list[TopTier]:
    values = ((body.annotations[value], body.shapes[value].shape) for value in body.outputs)
    return [top_tier_of(annotation, shape) for annotation, shape in values]
