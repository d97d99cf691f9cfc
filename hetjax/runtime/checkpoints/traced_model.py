"""The model that a checkpoint must be of: a loss, told by what is traced of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from hetjax.runtime.checkpoints.manifest import Manifest


@dataclass(frozen=True, eq=False)
class TracedModel:
    """A loss whose fingerprint is compared with those in manifests.

    Other equations may be traced for another number of examples: JAX has others where a dimension
    has size 1, and a loop over examples goes round as often as there are. So the loss is traced as
    it was when its state was saved, where that makes a difference.

    Args:
        num_examples: for how many it is traced first.
        fingerprint_for: from a number of examples to the fingerprint of what is then traced.

    Example:
        >>> model = TracedModel(2, lambda examples: "one" if examples == 1 else "several")
        >>> model.fingerprint
        'several'
        >>> [model.is_of(Manifest(0, "one", (), (), None, {}, saved)) for saved in (1, 3, None)]
        [True, False, False]
    """

    num_examples: int
    fingerprint_for: Callable[[int], str]

    @functools.cached_property
    def _known(self) -> Callable[[int], str]:
        """The same, which traces once for each number."""
        return functools.cache(self.fingerprint_for)

    @property
    def fingerprint(self) -> str:
        """The fingerprint for the number of examples that it is traced for first."""
        return self._known(self.num_examples)

    def is_of(self, manifest: Manifest) -> bool:
        """Whether a checkpoint is of this model.

        Args:
            manifest: the checkpoint's.
        """
        if manifest.model == self.fingerprint:
            return True
        saved = manifest.model_examples
        if saved is None or saved == self.num_examples:
            return False
        try:
            return manifest.model == self._known(saved)
        except Exception:  # Whatever it is: the loss that was saved could be traced so.
            return False
