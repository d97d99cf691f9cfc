"""Intra-operator sharding: the integer program against brute force, and its parts one by one."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hetjax.mesh import DeviceKind, Link
from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.stages.cutting import Stage, cut
from hetjax.planner.intra_op import StageDevices, Training
from hetjax.planner.intra_op.alike_nodes import solve_alike
from hetjax.planner.intra_op.collectives import Ring
from hetjax.planner.intra_op.elimination import sole_choice
from hetjax.planner.intra_op.integer_program import Edge, Graph, solve
from hetjax.planner.intra_op.stage_sharding import StageProblem

KIND = DeviceKind("test", {"float32": 1e12}, 10**9, 1e11, source="made up")
MOST_CHOICES = 3_000_000


def brute_force(graph: Graph, limit: float) -> float:
    """The least cost of all choices that fit, by looking at every one; infinite where none does."""
    rank = len(graph.seconds)

    def spread(array: np.ndarray, *nodes: int) -> np.ndarray:
        shape = [1] * rank
        for node, size in zip(nodes, array.shape, strict=True):
            shape[node] = size
        if list(nodes) != sorted(nodes):
            array = array.T
        return array.reshape(shape)

    seconds = functools.reduce(np.add, (spread(s, i) for i, s in enumerate(graph.seconds)))
    for edge in graph.edges:
        seconds = seconds + spread(edge.seconds, edge.source, edge.target)
    memory = functools.reduce(np.add, (spread(m, i) for i, m in enumerate(graph.memory)))
    return float(np.where(memory <= limit, seconds, np.inf).min())


def num_choices(graph: Graph) -> int:
    return int(np.prod([float(len(node)) for node in graph.seconds]))


def whole(program: Program) -> Stage:
    (stage,) = cut(program, (0, program.num_positions))
    return stage


@st.composite
def graphs_of_programs(draw: st.DrawFn) -> Graph:
    """The graph of a random network of products, sums with what came before, and reductions."""
    sizes = st.sampled_from([4, 8, 16])
    examples, tokens = draw(st.sampled_from([2, 4])), draw(sizes)
    widths = [draw(sizes) for _ in range(draw(st.integers(2, 5)))]
    layers = [
        (draw(st.sampled_from(["tanh", "centre", "none"])), draw(st.booleans())) for _ in widths
    ]
    shapes = [(a, b) for a, b in itertools.pairwise([8, *widths])]

    def loss(weights, x):
        before = {8: x}
        for weight, (kind, residual) in zip(weights, layers, strict=True):
            x = x @ weight
            if residual and x.shape[-1] in before:
                x = x + before[x.shape[-1]]
            if kind == "tanh":
                x = jnp.tanh(x)
            elif kind == "centre":
                x = x - jnp.mean(x, axis=-1, keepdims=True)
            before[x.shape[-1]] = x
        return jnp.sum(x**2), jnp.float32(examples)

    program = trace(
        loss,
        [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        jax.ShapeDtypeStruct((examples, tokens, 8), jnp.float32),
    )
    mesh_shape = draw(st.sampled_from([(1, 4), (2, 2), (1, 2)]))
    bandwidth = draw(st.sampled_from([1e8, 1e9, 1e11]))
    devices = StageDevices(KIND, mesh_shape[0] * mesh_shape[1], Link(bandwidth, 1e-9), 1e9)
    training = Training(examples, 2, draw(st.integers(1, 3)), "float32", 8.0)
    graph = StageProblem(program, whole(program), devices, training, mesh_shape).graph("data")
    assume(num_choices(graph) <= MOST_CHOICES)
    return graph


@settings(max_examples=25, deadline=None)
@given(graphs_of_programs(), st.floats(0.0, 1.0))
def test_the_integer_program_finds_what_brute_force_finds(graph, share):
    """Without a limit, and with one between the least memory and that of the free optimum."""
    free = solve(graph)
    assert free is not None
    assert free.is_optimal
    assert free.seconds == pytest.approx(brute_force(graph, np.inf), rel=1e-9)
    least = sum(float(node.min()) for node in graph.memory)
    limit = least + share * (free.memory_bytes - least)
    bound = solve(graph, limit)
    expected = brute_force(graph, limit)
    if bound is None:
        assert expected == np.inf
    else:
        assert bound.memory_bytes <= limit * (1 + 1e-9)
        assert bound.seconds == pytest.approx(expected, rel=1e-9)


def random_graph(seed: int) -> Graph:
    """Costs are whole, so that many choices cost the same."""
    random = np.random.default_rng(seed)
    counts = random.integers(1, 5, size=5)
    edges = []
    for source, target in itertools.combinations(range(5), 2):
        if random.random() < 0.6:
            matrix = random.integers(0, 9, (counts[source], counts[target])).astype(float)
            matrix[random.random(matrix.shape) < 0.15] = np.inf
            edges.append(Edge(source, target, matrix))
    seconds = tuple(random.integers(0, 9, n).astype(float) for n in counts)
    for node in seconds:
        node[1:][random.random(len(node) - 1) < 0.15] = np.inf
    memory = tuple(random.integers(0, 9, n).astype(float) for n in counts)
    return Graph(seconds, memory, tuple(edges))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_random_graphs_in_which_not_everything_goes_together(seed, with_limit):
    graph = random_graph(seed)
    limit = 15.0 if with_limit else np.inf
    expected, found = brute_force(graph, limit), solve(graph, limit)
    if found is None:
        assert expected == np.inf
    else:
        assert found.seconds == pytest.approx(expected)
        assert found.memory_bytes <= limit


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_what_is_eliminated_is_the_sole_best_choice(seed, alone):
    graph = random_graph(seed)
    if alone:
        random = np.random.default_rng(seed)
        seconds = tuple(node + random.random(len(node)) for node in graph.seconds)
        graph = Graph(seconds, graph.memory, graph.edges)
    choices = [*itertools.product(*(range(len(node)) for node in graph.seconds))]
    costs = [graph.cost(choice) for choice in choices]
    first, second = sorted([*costs, np.inf])[:2]
    found = sole_choice(graph)
    if second > first:
        assert found == choices[costs.index(first)]
    else:
        assert found is None


def test_too_large_tables_are_left_to_the_integer_program():
    random = np.random.default_rng(0)
    pairs = itertools.combinations(range(12), 2)
    edges = tuple(Edge(*pair, random.random((8, 8))) for pair in pairs)
    node = np.zeros(8)
    assert sole_choice(Graph((node,) * 12, (node,) * 12, edges)) is None


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(1.0, 20.0))
def test_the_sole_best_choice_is_only_taken_where_it_fits(seed, limit):
    graph = random_graph(seed)
    expected, found = brute_force(graph, limit), solve_alike(graph, limit)
    if found is None:
        assert expected == np.inf
    else:
        assert found.seconds == pytest.approx(expected, abs=1e-6)
        assert found.memory_bytes <= limit


def test_a_ring_takes_what_its_messages_take():
    ring = Ring(Link(1e9, 1e-3), 4)
    assert ring.all_gather(4e6) == pytest.approx(3 * (1e-3 + 1e-3))
    assert ring.all_reduce(4e6) == pytest.approx(2 * ring.all_gather(4e6))
    assert ring.all_to_all(4e6) == pytest.approx(3 * (1e-3 + 0.25e-3))
    assert ring.move(4e6, None, 1) == ring.move(4e6, 1, 1) == 0.0
    assert ring.move(4e6, 1, None) == ring.add_up(4e6, 0) == ring.all_gather(4e6)
    assert Ring(Link(1e9, 1e-3), 1).all_reduce(4e6) == 0.0
