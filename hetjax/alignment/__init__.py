"""Precision alignment: operators and losses of unlike kinds of devices beside a reference's.

Which kinds there are, and how far numbers are apart, is decided without a device; what touches one
is in `devices`, and what asks it in `comparison`, `training` and `captures`.
"""

from hetjax.alignment.comparison import (
    Comparison,
    OperatorDifference,
    compare_kinds,
    mean_relative_error,
)
from hetjax.alignment.devices import Injection, KindDevice, bind_kind
from hetjax.alignment.kinds import AlignedKind, parse_kinds
from hetjax.alignment.operators import Operator, OperatorProgram
from hetjax.alignment.tracing import trace_operators
from hetjax.alignment.training import KindTraining, Overflow, train_kind

__all__ = [
    "AlignedKind",
    "Comparison",
    "Injection",
    "KindDevice",
    "KindTraining",
    "Operator",
    "OperatorDifference",
    "OperatorProgram",
    "Overflow",
    "bind_kind",
    "compare_kinds",
    "mean_relative_error",
    "parse_kinds",
    "trace_operators",
    "train_kind",
]
