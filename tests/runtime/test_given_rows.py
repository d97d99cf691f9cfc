"""What workers are given of the driver's batch: the rows that they load, bit by bit, no others."""

from random import Random

import jax
import numpy as np
import optax
from cases import examples, random_case
from execution import job_of
from hypothesis import given
from hypothesis import strategies as st
from random_unions import random_union_case
from small_models import make_batch

from hetjax.runtime.workers.given_rows import given_rows
from hetjax.runtime.workers.job import lay_out


@examples(10)
@given(st.randoms(use_true_random=False), st.booleans())
def test_members_are_given_the_rows_that_they_load(rng: Random, is_union: bool):
    case = random_union_case(rng) if is_union else random_case(rng, 4, 3, 2)
    batch = make_batch(case.plan.batch_size)
    leaves = jax.tree.leaves(batch)
    placement = lay_out(job_of(case, optax.sgd(0.1)))
    for stage, plan in enumerate(case.plan.stages):
        pipeline, read = placement.pipeline_plan(stage), placement.pipelines.stages[stage].batch
        for member in range(len(plan.members)):
            feed = given_rows(placement, [stage], member, leaves)
            first, end = placement.examples_of(stage, member)
            if not read:
                assert feed.pieces == ()
                continue
            for microbatch in range(pipeline.num_microbatches):
                base = placement.first_example(stage) + microbatch * pipeline.microbatch_size
                found = feed(base + first, base + end)
                for leaf in read:
                    np.testing.assert_array_equal(
                        found[leaf], leaves[leaf][base + first : base + end]
                    )
            given_bytes = sum(leaf.nbytes for _, each in feed.pieces for leaf in each)
            share = (end - first) * pipeline.num_microbatches / case.plan.batch_size
            assert given_bytes == round(share * sum(leaves[leaf].nbytes for leaf in read))
