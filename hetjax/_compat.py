"""Everything that hetjax takes from JAX's less stable surface, in one place.

A new JAX release that moves one of these is mended here and nowhere else.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import socket
import stat
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.core import eval_jaxpr as eval_open_jaxpr
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe
from jax.sharding import AbstractMesh, PartitionSpec

Jaxpr = core.Jaxpr
ClosedJaxpr = core.ClosedJaxpr
JaxprEqn = core.JaxprEqn
Var = core.Var
Literal = core.Literal

# An equation of one of these primitives only calls the jaxpr under the parameter named here, so
# it can be replaced by that jaxpr's own equations.
_CALLS = {"pjit": "jaxpr", "jit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}


def called_jaxpr(equation: JaxprEqn) -> ClosedJaxpr | None:
    """The jaxpr that an equation merely calls, or None where it does more than call one."""
    parameter = _CALLS.get(equation.primitive.name)
    if parameter is None:
        return None
    inner = equation.params[parameter]
    return inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, [])


def inlined_jaxpr(equation: JaxprEqn) -> ClosedJaxpr | None:
    """What an equation computes by calling a jaxpr once, whatever derivative rule goes with it."""
    if equation.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        inner = equation.params["call_jaxpr"]
        return inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, [])
    return called_jaxpr(equation) or checkpointed_jaxpr(equation)


def has_rule_of_jax(equation: JaxprEqn) -> bool:
    """Whether a function with a derivative of its own is one of JAX, as a softmax may be.

    Both are then JAX's: a function of JAX may be given another derivative. Functions that JAX puts
    around anybody's, as `jax.custom_gradient` and `defjvps` do, are not counted as its own.
    """
    inner = inlined_jaxpr(equation)
    params = equation.params
    rules = [params[name] for name in ("jvp_jaxpr_fun", "bwd") if name in params]
    told = [each.debug_info for each in (*([] if inner is None else [inner.jaxpr]), *rules)]
    files = [Path(each.func_filename or "") for each in told]
    around = Path(jax.custom_gradient.__code__.co_filename)
    return bool(files) and all(
        file != around and Path(jax.__file__).parent in file.parents for file in files
    )


def scan_sizes(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many constants a scan has, and how many values go round.

    Args:
        params: the parameters of its equation.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # Since JAX 0.11 the operands are told as three trees: constants, what goes round, and rows.
    constants, carry, _ = params["ft_in"].unpack()
    return len(constants), len(carry)


def checkpointed_jaxpr(equation: JaxprEqn) -> ClosedJaxpr | None:
    """What a `jax.checkpoint` region computes; None for any other equation."""
    if equation.primitive.name not in ("checkpoint", "remat", "remat2"):
        return None
    return ClosedJaxpr(equation.params["jaxpr"], [])


def bind(equation: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Evaluate one equation on values or tracers.

    Args:
        equation: the jaxpr equation.
        operands: one value for each of its inputs.

    Returns:
        One value for each of its outputs.
    """
    parameters = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        results = equation.primitive.bind(*operands, **parameters)
    return list(results) if equation.primitive.multiple_results else [results]


def bind_with(equation: JaxprEqn, params: Mapping[str, Any], operands: Sequence[Any]) -> list[Any]:
    """Evaluate one equation with other parameters, in the mesh of the present trace.

    Args:
        equation: the jaxpr equation; it holds no jaxpr.
        params: what replaces its parameters.
        operands: one value for each of its inputs.

    Returns:
        One value for each of its outputs.
    """
    parameters = equation.primitive.get_bind_params(dict(params))
    results = equation.primitive.bind(*operands, **parameters)
    return list(results) if equation.primitive.multiple_results else [results]


def linear_identity(
    name: str,
    transpose: Callable[..., Any],
    compiled: Callable[..., Any] | None = None,
    mapped: Callable[..., Mapping[str, Any]] | None = None,
) -> core.Primitive:
    """A primitive that computes the identity.

    Args:
        name: its name.
        transpose: from a cotangent, and the primitive's parameters, to the operand's cotangent.
        compiled: what it is compiled as, from an operand and the parameters; nothing unless given.
        mapped: from an axis that `jax.vmap` adds, and the parameters, to those of one equation for
            all; it cannot be mapped unless given.

    Returns:
        The primitive, which can be differentiated and compiled.
    """
    primitive = core.Primitive(name)
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda x, **_: x)
    if compiled is None:
        mlir.register_lowering(primitive, lambda context, x, **_: [x])
    else:
        mlir.register_lowering(primitive, mlir.lower_fun(compiled, multiple_results=False))
    ad.deflinear2(primitive, lambda cotangent, _, **params: [transpose(cotangent, **params)])

    def batch(operands: Sequence[Any], axes: Sequence[int], **params: Any) -> Any:
        assert mapped is not None, "it is called where there is a rule"
        return primitive.bind(*operands, **mapped(axes[0], **params)), axes[0]

    if mapped is not None:
        batching.primitive_batchers[primitive] = batch
    return primitive


def barrier_primitive(name: str) -> core.Primitive:
    """A primitive that gives back all of its operands, none before all are there.

    Args:
        name: its name.

    Returns:
        The primitive, which can be compiled; it is not differentiated.
    """
    primitive = core.Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *arrays: list(jax.lax.optimization_barrier(arrays)))
    primitive.def_abstract_eval(lambda *avals: list(avals))
    barrier = mlir.lower_fun(
        lambda *arrays: jax.lax.optimization_barrier(arrays), multiple_results=True
    )
    mlir.register_lowering(primitive, barrier)
    return primitive


_COMPILED: dict[core.Primitive, Callable[..., Any]] = {}
"""What each primitive of `compiled_primitive` is compiled as on most platforms."""


def is_compiled(equation: JaxprEqn) -> bool:
    """Whether an equation's primitive is one of `compiled_primitive`."""
    return equation.primitive in _COMPILED


def compiled_jaxpr(equation: JaxprEqn) -> ClosedJaxpr | None:
    """What an equation is compiled as on most platforms; None for any primitive of JAX's own."""
    if not is_compiled(equation):
        return None
    function = _COMPILED[equation.primitive]
    avals: list[Any] = [each.aval for each in equation.invars]
    shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in avals]
    return jax.make_jaxpr(lambda *operands: function(*operands, **equation.params))(*shapes)


def compiled_primitive(
    name: str,
    shapes: Callable[..., Sequence[Any]],
    compiled: Mapping[str | None, Callable[..., Any]],
    mapped: Mapped,
    alone: Mapping[str, Callable[..., Any]] | None = None,
) -> core.Primitive:
    """A primitive of several results, one equation until it is compiled.

    Args:
        name: its name.
        shapes: from abstract operands and the parameters to abstract results; see `abstract_like`.
        compiled: what it is compiled as, from operands and parameters to a sequence of results, by
            platform; None for all others. JAX traces each once for equations that are alike.
        mapped: what an axis becomes that `jax.vmap` adds.
        alone: what it is compiled as in place of that in programs of a single device, by platform.

    Returns:
        The primitive, without a derivative.
    """
    primitive = core.Primitive(name)
    primitive.multiple_results = True

    @functools.lru_cache(maxsize=256)
    def computed(params: Any) -> Any:
        return jax.jit(lambda *operands: primitive.bind(*operands, **dict(params)))

    def batch(operands: Sequence[Any], axes: Sequence[Any], **params: Any) -> Any:
        moved, axis = mapped(operands, axes, params)
        results = primitive.bind(*moved, **params)
        return results, [axis] * len(results)

    _COMPILED[primitive] = compiled[None]
    primitive.def_impl(lambda *operands, **params: computed(tuple(params.items()))(*operands))
    primitive.def_abstract_eval(shapes)
    batching.primitive_batchers[primitive] = batch
    for platform, function in compiled.items():
        mlir.register_lowering(primitive, mlir.lower_fun(function), platform=platform)
    for platform, function in (alone or {}).items():
        of_many = mlir.lower_fun(compiled.get(platform, compiled[None]))
        rule = _lowered_by_devices(mlir.lower_fun(function), of_many)
        mlir.register_lowering(primitive, rule, platform=platform)
    return primitive


Mapped = Callable[
    [Sequence[Any], Sequence[int | None], Mapping[str, Any]], tuple[Sequence[Any], int]
]
"""From operands, their mapped axes (None where they have none) and parameters to the operands of
one equation for all, and the mapped axis of its results."""


def leading_axis(shared: Callable[[Mapping[str, Any]], Sequence[int]]) -> Mapped:
    """A mapped axis that leads in all operands but some, which are of all.

    Args:
        shared: from the parameters to the places of these.
    """

    def mapped(
        operands: Sequence[Any], axes: Sequence[int | None], params: Mapping[str, Any]
    ) -> tuple[list[Any], int]:
        size, of_all = mapped_size(operands, axes), shared(params)
        moved = []
        for place, (operand, axis) in enumerate(zip(operands, axes, strict=True)):
            if place in of_all and axis is not None:
                raise NotImplementedError(f"operand {place} differs along a mapped axis")
            moved.append(operand if place in of_all else led_by(operand, axis, size))
        return moved, 0

    return mapped


def mapped_size(operands: Sequence[Any], axes: Sequence[int | None]) -> int:
    """The size of a mapped axis."""
    return next(x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None)


def led_by(operand: Any, axis: int | None, size: int) -> Any:
    """An operand with a mapped axis in front; repeated along it where it has none."""
    return batching.bdim_at_front(operand, axis, size)


def _lowered_by_devices(alone: Callable[..., Any], of_many: Callable[..., Any]) -> Any:
    """A rule for programs of one device, and another for all others."""

    def lowered(context: Any, *operands: Any, **params: Any) -> Any:
        devices = getattr(context.module_context.axis_context, "num_devices", None)
        return (alone if devices == 1 else of_many)(context, *operands, **params)

    return lowered


def on_one_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function inside of which JAX need not be told the device that a program is compiled for.

    It would ask for that, to divide what it has its own rules for; but it knows of such functions
    in a program's equations alone, not of what an equation is compiled as.

    Args:
        function: of arrays, and with the results of arrays.
    """
    mesh = AbstractMesh((1,), ("alone",))
    everything = PartitionSpec()
    return jax.shard_map(
        function, mesh=mesh, in_specs=everything, out_specs=everything, check_vma=False
    )


def abstract_like(avals: Sequence[Any], shape: Sequence[int], dtype: Any) -> Any:
    """What an equation makes of operands that are not divided.

    Args:
        avals: the abstract operands.
        shape: its shape.
        dtype: its dtype.

    Returns:
        The abstract value, in the mesh of the first operand.

    Raises:
        TypeError: an operand is divided along an explicit axis of the mesh.
    """
    for aval in avals:
        if any(entry is not None for entry in aval.sharding.spec):
            raise TypeError(f"{aval} is divided along explicit axes; allowed: `auto_axes`")
    whole = avals[0].sharding.update(spec=PartitionSpec(*[None] * len(shape)))
    return avals[0].update(shape=tuple(shape), dtype=dtype, weak_type=False, sharding=whole)


def differentiate(
    primitive: core.Primitive,
    tangent: core.Primitive,
    backward: Callable[..., Sequence[Any]],
    *,
    moving: int,
) -> None:
    """Give a primitive a derivative along its first operands, with its own backward pass.

    Args:
        primitive: the primitive.
        tangent: one that makes of its operands, its results and tangents those of results.
        backward: from the primitive's operands, its results and their cotangents, of which those
            that are zero are None, to cotangents of the first operands.
        moving: how many operands these are.
    """

    def forward(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        results = primitive.bind(*primals, **params)
        along = tangents[:moving]
        if all(isinstance(each, ad.Zero) for each in along):
            return results, [ad.Zero(jax.typeof(each).to_tangent_aval()) for each in results]
        along = [ad.instantiate_zeros(each) for each in along]
        return results, tangent.bind(*primals, *results, *along, **params)

    def transpose(cotangents: Sequence[Any], *operands: Any, **params: Any) -> Any:
        known, linear = operands[:-moving], operands[-moving:]
        none = [None] * len(known)
        if all(isinstance(each, ad.Zero) for each in cotangents):
            return [*none, *(ad.Zero(each.aval) if _is_linear(each) else None for each in linear)]
        given = [None if isinstance(each, ad.Zero) else each for each in cotangents]
        found = backward(known, given, **params)
        pairs = zip(found, linear, strict=True)
        return [*none, *(each if _is_linear(of) else None for each, of in pairs)]

    ad.primitive_jvps[primitive] = forward
    ad.primitive_transposes[tangent] = transpose


_is_linear = ad.is_undefined_primal


def depends_on(closed: ClosedJaxpr, output: int) -> list[bool]:
    """Which inputs an output depends on, also where both go through a scan or a branch.

    Args:
        closed: the jaxpr.
        output: which of its outputs.

    Returns:
        One truth for each input.
    """
    wanted = [place == output for place in range(len(closed.jaxpr.outvars))]
    return list(pe.dce_jaxpr(closed.jaxpr, wanted)[1])


def known_outputs(closed: ClosedJaxpr) -> list[Any]:
    """The outputs of a jaxpr that are numbers which it knows; None for each other one."""
    return [_number(atom) if isinstance(atom, Literal) else None for atom in closed.jaxpr.outvars]


def _number(literal: Literal) -> Any:
    """What a literal was before it was traced: of Python, or of NumPy."""
    aval: Any = literal.aval
    value = np.asarray(literal.val, aval.dtype)
    return value.item() if aval.weak_type else value


def node_classes(structure: Any) -> set[type]:
    """The classes of the nodes that the structure of a pytree has."""
    found, left = set(), [structure]
    for each in left:
        node = each.node_data()
        found |= set() if node is None else {node[0]}
        left += each.children()
    return found


def is_traced(x: Any) -> bool:
    """Whether a value stands for one that a trace will compute."""
    return isinstance(x, Tracer)


def context_of(equation: JaxprEqn) -> Hashable:
    """What an equation is computed under beside its parameters: settings that JAX keeps."""
    context = equation.ctx
    metadata = tuple(sorted((context.xla_metadata or {}).items()))
    mesh = context.cur_abstract_mesh
    return str(context.compute_type), context.threefry_partitionable, metadata, mesh


def source_line(equation: JaxprEqn) -> str:
    """The file and the line of the user's program that an equation comes from."""
    return next(iter(source_lines(equation)), "an unknown line")


def source_lines(equation: JaxprEqn) -> tuple[str, ...]:
    """The lines of the user's program that led to an equation, the innermost first."""
    traceback = equation.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    # Farther out are the lines of who asks for a derivative, as a planner does.
    led = itertools.takewhile(lambda frame: Path(frame.file_name) != _ASKS, frames)
    return tuple(
        f"{frame.file_name}:{frame.line_num}" for frame in led if _is_users(Path(frame.file_name))
    )


@functools.lru_cache(maxsize=1024)
def _is_users(path: Path) -> bool:
    return (_LIBRARIES | _CALLED).isdisjoint((path, *path.parents))


def _library(name: str) -> Path:
    """The folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(name)
    origin = spec and spec.origin
    assert origin, name
    return Path(origin).parent


_LIBRARIES = frozenset(map(_library, ("jax", "jaxlib", "flax", "optax")))
"""What a line of the user's program calls."""

_CALLED = frozenset(
    Path(__file__).parent / part for part in ("_compat.py", "sharding", "runtime/moves")
)
"""Where `hetjax.reshard` and `hetjax.attention` are, which it calls, too."""

_ASKS = Path(__file__).parent / "pipeline/program/opened_equations.py"
"""Where derivatives of calls are traced."""


def is_transposed(equation: JaxprEqn) -> bool:
    """Whether an equation is of a backward pass: JAX made it as the transpose of a forward one."""
    return "transpose(" in str(equation.source_info.name_stack)


def eval_jaxpr(closed: ClosedJaxpr, *operands: Any) -> list[Any]:
    """Evaluate a closed jaxpr on flat operands."""
    return eval_open_jaxpr(closed.jaxpr, closed.consts, *operands)


def inner_jaxprs(equation: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs that an equation's parameters hold: a scan's body, a conditional's branches."""
    found: list[Jaxpr] = []
    for parameter in equation.params.values():
        for item in parameter if isinstance(parameter, tuple | list) else (parameter,):
            if isinstance(item, ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, Jaxpr):
                found.append(item)
    return found


def rewritten(equation: JaxprEqn, rewrite: Callable[[JaxprEqn], JaxprEqn]) -> JaxprEqn:
    """An equation with others in the place of those in its bodies, and in its own.

    Args:
        equation: the equation.
        rewrite: from an equation to what stands for it, of the same operands and results.

    Returns:
        The equation.
    """

    def of_jaxpr(jaxpr: Jaxpr) -> Jaxpr:
        return jaxpr.replace(eqns=[rewritten(each, rewrite) for each in jaxpr.eqns])

    def of_parameter(parameter: Any) -> Any:
        if type(parameter) in (tuple, list):
            return type(parameter)(map(of_parameter, parameter))
        if isinstance(parameter, ClosedJaxpr):
            return ClosedJaxpr(of_jaxpr(parameter.jaxpr), parameter.consts)
        return of_jaxpr(parameter) if isinstance(parameter, Jaxpr) else parameter

    if inner_jaxprs(equation):
        params = {name: of_parameter(value) for name, value in equation.params.items()}
        equation = equation.replace(params=params)
    return rewrite(equation)


def without_calls(
    closed: ClosedJaxpr, called: Callable[[JaxprEqn], ClosedJaxpr | None] = called_jaxpr
) -> ClosedJaxpr:
    """A jaxpr with the equations of those that it merely calls.

    Each has its own source lines, or those of the call where none of its own are the user's.

    Args:
        closed: the jaxpr.
        called: the jaxpr that is put in the place of an equation; None for one that stays.

    Returns:
        The jaxpr, without calls.
    """
    equations: list[JaxprEqn] = []
    consts = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))

    def add(jaxpr: Jaxpr, names: dict[Any, Any], call: JaxprEqn | None) -> None:
        def read(atom: Any) -> Any:
            return atom if isinstance(atom, Literal) else names.get(atom, atom)

        for equation in jaxpr.eqns:
            if call is not None and not source_lines(equation):
                equation = equation.replace(source_info=call.source_info)
            operands = [read(atom) for atom in equation.invars]
            inner = called(equation)
            if inner is None:
                made = [_renewed(each) for each in equation.outvars]
                equations.append(equation.replace(invars=operands, outvars=made))
                names.update(zip(equation.outvars, made, strict=True))
                continue
            own = dict(zip(inner.jaxpr.invars, operands, strict=True))
            for variable, value in zip(inner.jaxpr.constvars, inner.consts, strict=True):
                own[variable] = _renewed(variable)
                consts[own[variable]] = value
            add(inner.jaxpr, own, equation)
            results = [
                each if isinstance(each, Literal) else own[each] for each in inner.jaxpr.outvars
            ]
            names.update(zip(equation.outvars, results, strict=True))

    names: dict[Any, Any] = {}
    add(closed.jaxpr, names, None)
    outputs = [
        each if isinstance(each, Literal) else names.get(each, each)
        for each in closed.jaxpr.outvars
    ]
    flat = closed.jaxpr.replace(constvars=list(consts), eqns=equations, outvars=outputs)
    return ClosedJaxpr(flat, list(consts.values()))


def _renewed(variable: Any) -> Any:
    return type(variable)(variable.aval)


def spliced(jaxpr: Jaxpr, operands: Sequence[Any], equation: JaxprEqn) -> list[JaxprEqn]:
    """The equations of a jaxpr that stand for one equation of another.

    Args:
        jaxpr: the jaxpr, of one output; its constants are those of the other one, too.
        operands: what it takes there.
        equation: the equation, whose result and source lines they get.

    Returns:
        The equations.
    """
    names: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
    names[jaxpr.outvars[0]] = equation.outvars[0]
    return [
        each.replace(
            invars=[a if isinstance(a, Literal) else names.get(a, a) for a in each.invars],
            outvars=[names.get(variable, variable) for variable in each.outvars],
            source_info=equation.source_info,
        )
        for each in jaxpr.eqns
    ]


def without_dead_equations(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A jaxpr without equations that no output needs, also in its bodies; inputs stay."""
    used = [True] * len(closed.jaxpr.outvars)
    jaxpr, _ = pe.dce_jaxpr(closed.jaxpr, used, instantiate=True)
    return ClosedJaxpr(jaxpr, closed.consts)


class ListeningServer:
    """A server of `jax.experimental.transfer`, which can be told to listen no more.

    JAX has no call for that. The sockets that the server has opened are found among this process's
    own, and other descriptors are put in their places.

    Args:
        client: the client of the devices whose arrays it moves.
        host: the only address that it listens on.

    Attributes:
        server: the server.
    """

    def __init__(self, client: Any, host: str):
        from jax.experimental import transfer

        before = set(_listening())
        self.server = transfer.start_transfer_server(client, f"{host}:0", [f"{host}:0"])
        addresses = {number: each for number, each in _listening() if (number, each) not in before}
        self._sockets = {n: each for n, each in addresses.items() if each[0] == host.strip("[]")}

    def stop_listening(self) -> None:
        """Accept no connection from now on; those that are there stay.

        The system refuses connections from the server's next transfer on, when its loop lets go of
        the sockets; until then they are never read.
        """
        # What takes the place of a listening socket never becomes ready, so that the server's loop
        # waits for it as it did for connections.
        never = os.eventfd(0)
        for number in self._sockets:
            os.dup2(never, number, inheritable=False)
        os.close(never)
        self._sockets = {}


def _listening() -> Iterator[tuple[int, tuple[str, int]]]:
    """The descriptors and the addresses of this process's sockets that listen for TCP."""
    if not os.path.isdir("/proc/self/fd"):
        return
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(name))
        except OSError:  # It has been closed meanwhile.
            continue
        if not stat.S_ISSOCK(os.fstat(copy).st_mode):
            os.close(copy)
            continue
        with socket.socket(fileno=copy) as found:
            is_internet = found.family in (socket.AF_INET, socket.AF_INET6)
            if is_internet and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield int(name), found.getsockname()[:2]
