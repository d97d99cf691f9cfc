"""The configuration of a run: settings, the gin files that hold them, and what is made of them.

Nothing here imports JAX until a model, an optimizer or a plan is made.
"""

from hetjax.configuration.gin_file import changes, read_configuration, write_configuration
from hetjax.configuration.help import settings_help
from hetjax.configuration.packaged import configuration_file, packaged_configurations
from hetjax.configuration.settings import (
    ClusterSettings,
    Configuration,
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    PlannerSettings,
    RuntimeSettings,
    TrainSettings,
    make_configuration,
    settings,
)

__all__ = [
    "ClusterSettings",
    "Configuration",
    "DataSettings",
    "ModelSettings",
    "OptimizerSettings",
    "PlannerSettings",
    "RuntimeSettings",
    "TrainSettings",
    "changes",
    "configuration_file",
    "make_configuration",
    "packaged_configurations",
    "read_configuration",
    "settings",
    "settings_help",
    "write_configuration",
]
