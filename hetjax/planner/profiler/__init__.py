"""The profiler: which runs of layers to measure, where measurements are kept, what they make up.

Nothing here touches a device; `hetjax.runtime.local.profiling` measures.
"""

from hetjax.planner.profiler.composition import RunFigure, compose, composition_error
from hetjax.planner.profiler.database import Key, ProfileDatabase
from hetjax.planner.profiler.measured_runs import Unit, layer_classes, num_structures, units
from hetjax.planner.profiler.measurement import (
    ROUNDS,
    Measured,
    Measurement,
    Request,
    merged,
    typical,
)
from hetjax.planner.profiler.profiler import (
    Survey,
    Wanted,
    make_profile,
    num_to_measure,
    survey,
)
from hetjax.planner.profiler.structure import structure_digest

__all__ = [
    "ROUNDS",
    "Key",
    "Measured",
    "Measurement",
    "ProfileDatabase",
    "Request",
    "RunFigure",
    "Survey",
    "Unit",
    "Wanted",
    "compose",
    "composition_error",
    "layer_classes",
    "make_profile",
    "merged",
    "num_structures",
    "num_to_measure",
    "structure_digest",
    "survey",
    "typical",
    "units",
]
