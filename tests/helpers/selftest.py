"""What the tests of `selftest` share: bundles to damage, and what is wrong with them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from planforge.runtime.apps.check.selftest import SelftestResult
from planforge.runtime.bundle.bundle import Bundle, compute_sha256

from .plans import with_manifest

DECODING = ["prefill and decode, batch 1", "greedy, 2 prompts, padded", "greedy, 8 prompts, padded"]
DECODING += [
    "parts of 7 tokens, batch 1",
    "parts of 7 tokens, 7 prompts, padded",
    "prompts of 128, 129 tokens",
    "full context",
]
STEPS = "single steps at positions 1 to 255"
DECODING += ["random batches, padded, seed 0", STEPS, "real text"]
ENCODING = ["one by one", "3 sources, padded", "1 token", "64 tokens"]
TRANSLATING = ["decode, batch 1", "at once, batch 1", "greedy, 3 sources, padded"]
TRANSLATING += ["full target of 64 tokens", "4 beams, 2 sources, padded"]
DRAWN_TARGETS = [
    "random batches, padded, seed 0",
    "single steps at positions 1 to 63",
]


def bundle_named(name: str, request: pytest.FixtureRequest) -> Path:
    """A verified bundle: gpt2, marian, dates, or one of conftest's heads. Don't change it."""
    fixtures = {"gpt2": "demo_bundle", "marian": "marian_bundle", "dates": "dates_bundle"}
    found: Path = (
        request.getfixturevalue(fixtures[name])
        if name in fixtures
        else request.getfixturevalue("head_bundle")(name)
    )
    return found


def copied(bundle: Path, folder: Path) -> Path:
    return Path(shutil.copytree(bundle, folder / "bundle"))


def failed(result: SelftestResult) -> dict[str, str]:
    """What is wrong with each case that failed."""
    return {c.case: "; ".join(c.failures) for c in result.comparisons if not c.passed}


def change_weight(bundle: Path, artifact_id: str, ending: str, factor: float) -> None:
    """Multiplies one matrix, and lists its file in the manifest as if it were right."""
    artifact = Bundle.open(bundle).manifest.artifact(artifact_id)
    values = ir.load(bundle / artifact.file).graph.initializers
    tensor = next(v.const_value for name, v in values.items() if name.endswith(ending))
    assert isinstance(tensor, ir.ExternalTensor) and tensor.offset is not None
    changed = (tensor.numpy() * factor).astype(tensor.dtype.numpy()).tobytes()
    (name,) = artifact.data
    content = bytearray((bundle / name).read_bytes())
    before = bytes(content)
    content[tensor.offset : tensor.offset + len(changed)] = changed
    assert len(content) == len(before) and bytes(content) != before
    (bundle / name).unlink()  # it is mapped
    (bundle / name).write_bytes(content)
    mend(bundle, name)


def mend(bundle: Path, name: str) -> None:
    """Lists a file as it is now."""

    def change(value: dict[str, Any]) -> None:
        value["files"][name] = {
            "sha256": compute_sha256(bundle / name),
            "bytes": (bundle / name).stat().st_size,
        }

    with_manifest(bundle, change)
