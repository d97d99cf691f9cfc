"""What both ends of a transfer do on devices, for any two layouts.

The processes of a stage are played by one process, which has the devices of all of them.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from compilations import counted_compilations
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from layouts import Layout, array_shapes, layouts

from hetjax.runtime.moves.peers import Peer
from hetjax.runtime.moves.transfer_ends import (
    CrossingArray,
    Landing,
    ReceivingEnd,
    SendingEnd,
    gatherer,
)
from hetjax.sharding import Network
from hetjax.sharding.annotation.rules import MESH_AXES
from hetjax.sharding.resolution.senders import BestLink

pairs_of_layouts = array_shapes.flatmap(lambda shape: st.tuples(layouts(shape), layouts(shape)))
FIRST = 100
"""The first device of a receiving stage."""
dtypes = st.sampled_from([np.float32, jax.numpy.bfloat16, np.int32, np.bool_])


def mesh_of(layout: Layout) -> Mesh:
    devices = jax.devices()[: int(np.prod(layout.mesh_shape))]
    return Mesh(np.array(devices).reshape(layout.mesh_shape), MESH_AXES)


def crossing_array(source: Layout, target: Layout, dtype: Any) -> CrossingArray:
    processes = {device: (0, place) for device, place in source.processes().items()}
    processes |= {device: (1, place) for device, place in target.processes(FIRST).items()}
    return CrossingArray.between(
        jax.ShapeDtypeStruct(source.shape, dtype),
        source.annotation(),
        target.annotation(FIRST),
        processes,
        BestLink(Network.alike()),
    )


def sent(
    crossing_array: CrossingArray, source: Layout, array: jax.Array
) -> dict[Peer, dict[Peer, list[jax.Array]]]:
    """For each receiving process, what each sending one offers it."""
    offers: dict[Peer, dict[Peer, list[jax.Array]]] = defaultdict(dict)
    for place in range(source.num_processes):
        end = SendingEnd([crossing_array], mesh_of(source), (0, place))
        for receiver, pieces in end.offers([array]).items():
            offers[receiver][0, place] = pieces
    return offers


def pulled(
    end: ReceivingEnd, offered: dict[Peer, list[jax.Array]]
) -> dict[Peer, Sequence[jax.Array]]:
    """What a carrier brings of the pieces that are offered."""
    assert end.requests.keys() == offered.keys()
    found = {}
    for sender, wanted in end.requests.items():
        assert [(p.shape, p.dtype) for p in offered[sender]] == [(w.shape, w.dtype) for w in wanted]
        found[sender] = jax.device_put(offered[sender], [want.sharding for want in wanted])
    return found


@settings(max_examples=40)
@given(pair=pairs_of_layouts, dtype=dtypes)
def test_an_array_arrives_as_its_receiver_wants_it(pair: tuple[Layout, Layout], dtype: Any):
    source, target = pair
    whole = np.arange(np.prod(source.shape)).reshape(source.shape).astype(dtype)
    crossed = crossing_array(source, target, dtype)
    array = jax.device_put(whole, NamedSharding(mesh_of(source), source.spec))
    offers = sent(crossed, source, array)

    mesh, num_bytes, parts = mesh_of(target), 0, []
    for place in range(target.num_processes):
        end = ReceivingEnd([crossed], mesh, (1, place))
        num_bytes += end.num_bytes
        parts += end.parts(pulled(end, offers.get((1, place), {})))[0]
    assert num_bytes == whole.nbytes, "every byte crosses once"

    landing = Landing(crossed, mesh, (1, 0))
    found = landing.array(parts)
    gather = gatherer([landing], mesh)
    if gather is not None:
        (found,) = gather([found])
    assert found.sharding.is_equivalent_to(NamedSharding(mesh, target.spec), found.ndim)
    np.testing.assert_array_equal(np.asarray(found), whole)


def test_nothing_is_computed_where_both_ends_divide_alike():
    layout = Layout((8, 4), PartitionSpec("data"), (2, 1), 1)
    crossed, mesh = crossing_array(layout, layout, np.float32), mesh_of(layout)
    array = jax.device_put(np.ones((8, 4), np.float32), NamedSharding(mesh, layout.spec))
    with counted_compilations() as compiled:
        end = SendingEnd([crossed], mesh, (0, 0))
        ((piece,),) = end.offers([array]).values()
        ReceivingEnd([crossed], mesh, (1, 0))
    assert piece.unsafe_buffer_pointer() == array.addressable_data(0).unsafe_buffer_pointer()
    assert not compiled.seen
