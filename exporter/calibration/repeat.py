"""What an export calibrated, computed again: a damaged graph must not set its own limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..comparison.tasks import AnyExaminer
from ..limits import CAPS
from .calibration import Calibration, compute_cache_scales, hash_texts

if TYPE_CHECKING:
    from ..reference.model import ReferenceModel

Array = npt.NDArray[np.float32]

# What other machines' fp32 moves a scale by: an engine's results may be off by the cap of fp32, in units
# that no largest value is below. A scale that is 1 % off costs nothing beside the headroom of 25 %.
ABSOLUTE = CAPS["fp32"]["max_error"]  # of a cache's largest scale
RELATIVE = 0.01
# Of a graph that does not tell its texts: with other texts few of the largest values are the same.
ALIKE = 0.9


def repeat_calibration(examiner: AnyExaminer, model: ReferenceModel, calibration: Calibration) -> Calibration:
    """Return what graphs were calibrated to, with a cache's scales computed again from the same texts.

    With other texts than the export's, such as a user's prompts, the scales stay those of the graphs.
    """
    if not calibration.cache_scales:
        return calibration
    texts = hash_texts(examiner)
    recorded = {artifact.quantization.get("texts") for artifact in examiner.bundle.manifest.artifacts}
    recorded.discard(None)
    if recorded and recorded != {texts}:
        return calibration
    scales = compute_cache_scales(examiner, model)
    if not recorded and not are_alike(calibration.cache_scales, scales):
        return calibration
    return replace(calibration, cache_scales=scales, texts=texts)


def are_alike(found: Mapping[str, Array], meant: Mapping[str, Array]) -> bool:
    """Tell whether so many scales are the same that they must come from the same texts."""
    far = [find_far_channels(found[name], meant[name]) for name in meant if name in found]
    return bool(far) and 1 - float(np.concatenate(far).mean()) >= ALIKE


def find_far_channels(found: Array, meant: Array) -> npt.NDArray[np.bool_]:
    """Tell which of a cache's scales are not those that the same texts need."""
    if found.shape != meant.shape:
        return np.ones(meant.shape, bool)
    allowed = RELATIVE * meant + ABSOLUTE * meant.max()
    far: npt.NDArray[np.bool_] = ~((np.abs(found - meant) <= allowed) & (found > 0))  # NaN is not
    return far
