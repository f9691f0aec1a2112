"""Who loads what, and what the packages offer. Each check runs in a fresh process of its own."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

from .helpers.modules import modules_after

HEAVY = {"torch", "transformers", "onnx", "onnx_ir", "onnxscript"}
COMMAND_ONLY = {"typer", "rich"}


def modules_of_command(*arguments: str | Path) -> set[str]:
    return modules_after(
        "from planforge.exporter.commands.app import app\n"
        f"app({[str(a) for a in arguments]!r}, standalone_mode=False)"
    )


def test_the_runtime_loads_no_framework() -> None:
    loaded = modules_after("import planforge.runtime")
    assert not loaded & (HEAVY | COMMAND_ONLY | {"onnxruntime"})
    assert "numpy" in loaded


def test_generating_loads_onnx_runtime_and_no_framework(demo_bundle: Path) -> None:
    loaded = modules_after(
        f"from planforge.runtime import load\nload({str(demo_bundle)!r}).generate('In the', max_new_tokens=2)"
    )
    assert not loaded & (HEAVY | COMMAND_ONLY)
    assert "onnxruntime" in loaded


def test_generating_loads_nothing_of_the_other_tasks(demo_bundle: Path) -> None:
    code = f"load({str(demo_bundle)!r}).generate('In the', max_new_tokens=2)"
    loaded = modules_after(f"from planforge.runtime import load\n{code}", whole=True)
    assert "planforge.runtime.generate.text_generator" in loaded
    others = ("translate.translator", "encode.text_encoder", "encode.tasks", "encode.results")
    assert not loaded & {f"planforge.runtime.{name}" for name in others}
    assert all(importlib.util.find_spec(f"planforge.runtime.{name}") for name in others)


def test_run_and_inspect_load_neither_torch_nor_onnx(demo_bundle: Path) -> None:
    assert not modules_of_command("run", demo_bundle, "In the", "--max-new-tokens", "2") & HEAVY
    assert not modules_of_command("inspect", demo_bundle) & HEAVY


def test_bench_loads_neither_torch_nor_onnx(own_bundle: Path) -> None:
    settings = ("--precision", "fp32", "--new-tokens", "2", "--set-default")
    assert not modules_of_command("bench", own_bundle, *settings) & HEAVY


def test_selftest_loads_no_framework_and_nothing_of_verify(
    demo_bundle: Path, marian_bundle: Path, head_bundle: Callable[[str], Path]
) -> None:
    for bundle in (demo_bundle, marian_bundle, head_bundle("pretrained")):
        loaded = modules_after(
            "from planforge.exporter.commands.app import app\n"
            f"app(['selftest', {str(bundle)!r}, '--backend', 'ort-cpu'], standalone_mode=False)",
            whole=True,
        )
        assert "planforge.runtime.apps.check.metrics" in loaded
        assert not {name.split(".")[0] for name in loaded} & HEAVY
        assert "planforge.exporter.verification" not in loaded


def test_selftest_in_python_loads_nothing_of_the_command(demo_bundle: Path) -> None:
    code = "from planforge.runtime.apps.check.selftest import selftest"
    code += f"\nassert selftest({str(demo_bundle)!r}, 'ort-cpu').passed"
    loaded = modules_after(code, whole=True)
    assert not {name.split(".")[0] for name in loaded} & (HEAVY | COMMAND_ONLY)
    assert "planforge.exporter" not in loaded


def test_what_bench_measures_loads_no_framework_and_nothing_of_the_command(demo_bundle: Path) -> None:
    work = f"bench_work.Work({str(demo_bundle)!r}, 'auto', 'fp32', new_tokens=2)"
    loaded = modules_after(
        f"from planforge.runtime.apps.diagnostics import bench_work\nbench_work.serve({work})"
    )
    assert not loaded & (HEAVY | COMMAND_ONLY | {"matplotlib"})


def test_build_loads_no_torch(own_bundle: Path) -> None:
    loaded = modules_of_command("build", own_bundle, "--sm", "sm86")
    assert not loaded & {"torch", "transformers"}


def test_importing_without_verification_loads_no_torch(exported: Path, tmp_path: Path) -> None:
    choices = ("--precision", "fp32", "--target", "cpu", "--no-verify")
    loaded = modules_of_command("import", exported / "llama.onnx", "-o", tmp_path / "bundle", *choices)
    assert not loaded & {"torch", "transformers"}


def test_verifying_without_pytorch_loads_no_torch(demo_bundle: Path) -> None:
    graphs = ["decoder.ort.fp32", "decoder.inplace.fp16"]
    loaded = modules_after(
        "from planforge.exporter.verification import verify\n"
        "verify.find_recorded_source = lambda bundle: None\n"
        f"assert verify.verify({str(demo_bundle)!r}, only={graphs}).passed"
    )
    assert not loaded & {"torch", "transformers", "onnxscript", "safetensors"}  # the extra verify has none


@pytest.mark.parametrize("package", ["planforge.runtime", "planforge.exporter", "planforge.models"])
def test_what_a_package_offers_is_listed_and_documented(package: str) -> None:
    module = importlib.import_module(package)
    for name in module.__all__:
        offered = getattr(module, name)
        assert name in ALIASES or inspect.getdoc(offered), f"{package}.{name} has no docstring"
        if inspect.isclass(offered):
            for method, value in vars(offered).items():
                if inspect.isfunction(value) and not method.startswith("_"):
                    assert inspect.getdoc(value), f"{package}.{name}.{method} has no docstring"


# Python names these by what they stand for.
ALIASES = ["FinishReason", "Item", "Layers", "Message", "Pooling", "ProgressOption", "Prompt", "Truncation"]


def test_the_runtime_offers_every_error_that_it_raises() -> None:
    import planforge.runtime as runtime
    from planforge.runtime import errors

    tree = [value for value in vars(errors).values() if inspect.isclass(value)]
    assert len(tree) > 10
    for error in tree:
        assert getattr(runtime, error.__name__) is error


def test_the_runtime_offers_what_it_lists() -> None:
    import planforge.runtime as runtime

    assert dir(runtime) == sorted(runtime.__all__)
    for name in runtime.__all__:
        offered = getattr(runtime, name)
        assert getattr(offered, "__name__", name) == name or name in ALIASES
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = runtime.Nothing  # type: ignore[attr-defined]
