"""The two distributions of a release: planforge-runtime runs bundles alone, and planforge stands on it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

from planforge.runtime.errors import suggest_install

from ..helpers.paths import ROOT

CORE_FILES = 183  # 15 of them are for pictures, 1 for recurrent decoders, 3 for words, 22 for retrieval
CORE_BYTES = 1_190_000  # 160,000 of them embed and search texts, and read what is found; 7,000 OpenVINO
RUN = """
import sys
from planforge.runtime import load

generator, chat, encoder, classifier, translator = sys.argv[1:]
with load(generator) as model:
    print("generate", repr(model.generate("In the beginning", max_new_tokens=4).text))
    print("stream", repr("".join(piece.text for piece in model.stream("In the beginning", max_new_tokens=4))))
with load(chat) as model:
    question = [{"role": "user", "content": "And God said, Let there be light."}]
    print("chat", repr(model.chat(question, max_new_tokens=4).text))
with load(encoder) as model:
    print("embed", model.embed(["Birds can fly.", "Wings lift."]).shape)
with load(classifier) as model:
    print("classify", model.classify("Birds can fly.").label)
with load(translator) as model:
    print("translate", repr(model.translate("the 3rd of May, 1998").text))
applications = [name for name in sys.modules if name.startswith("planforge.runtime.apps")]
heavy = {"torch", "transformers", "onnx", "planforge.exporter"} & set(sys.modules)
print("loaded", applications, heavy, sys.modules["planforge.runtime"].__file__)
"""


class Environment:
    """A virtual environment that has what the core needs, and gets and loses wheels by pip."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "venv")
        self.python = next(p for p in folder.glob("venv/*/python*") if p.stem == "python")
        (self.packages,) = folder.glob("venv/[Ll]ib/**/site-packages")
        # Of this folder's own .pth files, one of which leads to the checkout, none is read.
        (self.packages / "needs.pth").write_text(str(Path(np.__file__).parent.parent), encoding="utf-8")
        self.folder = folder

    def run(self, code: str, *arguments: str | Path) -> str:
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [str(self.python), "-c", code, *map(str, arguments)]
        done = subprocess.run(command, cwd=self.folder, env=kept, capture_output=True, encoding="utf-8")
        assert done.returncode == 0, done.stderr
        return done.stdout

    def pip(self, *arguments: str | Path) -> None:
        command = [sys.executable, "-m", "pip", "--python", str(self.python), *map(str, arguments)]
        subprocess.run([*command, "-q", "--disable-pip-version-check"], check=True, capture_output=True)


def build(kind: str, backend: str, source: Path, out: Path) -> Path:
    """Build a wheel or an sdist of a folder; return its file."""
    code = f"import sys; from {backend} import build_{kind}; print(build_{kind}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)], cwd=source, check=True, capture_output=True, text=True
    )
    return out / done.stdout.splitlines()[-1]


def read_needs(wheel: Path) -> list[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    return [Requirement(line) for line in Parser().parsestr(text).get_all("Requires-Dist", [])]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The core, and what stands on it: made of its source distribution, as from an index."""
    folder = tmp_path_factory.mktemp("wheels")
    ignored = shutil.ignore_patterns("*.safetensors", "__pycache__")
    shutil.copytree(ROOT / "runtime", folder / "runtime", ignore=ignored)
    core = build("wheel", "hatchling.build", folder / "runtime", folder)
    source = folder / "source"
    for package in ("exporter", "models", "runtime/apps"):
        shutil.copytree(ROOT / package, source / package, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    with tarfile.open(build("sdist", "setuptools.build_meta", source, folder)) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return core, build("wheel", "setuptools.build_meta", unpacked, folder)


@pytest.fixture(scope="module")
def environment(wheels: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    made = Environment(tmp_path_factory.mktemp("environment"))
    made.pip("install", "--no-index", "--no-deps", *wheels)
    return made


def test_both_wheels_have_each_file_once(wheels: tuple[Path, Path]) -> None:
    core, rest = (set(zipfile.ZipFile(wheel).namelist()) for wheel in wheels)
    assert not core & rest
    kept = [path for path in core if path.startswith("planforge/")]
    assert all(path.startswith("planforge/runtime/") for path in kept)
    assert not any(path.startswith("planforge/runtime/apps/") for path in core)
    own = {path for path in core | rest if path.endswith(".py") and path.startswith("planforge/runtime/")}
    assert own == {f"planforge/{path.relative_to(ROOT).as_posix()}" for path in ROOT.glob("runtime/**/*.py")}
    assert len(core) <= CORE_FILES
    (license_file,) = (path for path in core if path.endswith("/LICENSE"))
    assert zipfile.ZipFile(wheels[0]).read(license_file) == (ROOT / "LICENSE").read_bytes()
    assert sum(info.file_size for info in zipfile.ZipFile(wheels[0]).infolist()) <= CORE_BYTES


def test_planforge_needs_the_core_of_its_own_version(wheels: tuple[Path, Path]) -> None:
    core, rest = map(read_needs, wheels)
    always = [str(need) for need in rest if need.marker is None]
    (version,) = set(re.findall(r"-(\d[^-]*)-py3", " ".join(wheel.name for wheel in wheels)))
    assert always == [f"planforge-runtime=={version}"]
    # A clone is one distribution, which needs what the core needs.
    clone = [Requirement(line) for line in distribution("planforge").requires or ()]
    assert {str(need) for need in core if need.marker is None} == {
        str(need) for need in clone if need.marker is None
    }
    known = {str(need).replace("'", '"') for need in rest}
    assert {str(need).replace("'", '"') for need in core if "extra" in str(need.marker)} <= known


def test_the_core_runs_bundles_alone(
    environment: Environment,
    demo_bundle: Path,
    llama_demo_bundle: Path,
    minilm_bundle: Path,
    head_bundle: Callable[[str], Path],
    dates_bundle: Path,
) -> None:
    """Both are installed, then planforge is taken away: its files are gone, and bundles still run."""
    classifier = head_bundle("classifier")
    bundles = (demo_bundle, llama_demo_bundle, minilm_bundle, classifier, dates_bundle)
    both = environment.run(RUN, *bundles)
    environment.run("import planforge.exporter, planforge.runtime.apps.check")
    environment.pip("uninstall", "-y", "planforge")
    assert sorted(path.name for path in (environment.packages / "planforge").iterdir()) == ["runtime"]
    assert environment.run(RUN, *bundles) == both
    *_, loaded = both.splitlines()
    assert loaded == f"loaded [] set() {environment.packages / 'planforge' / 'runtime' / '__init__.py'}"


@pytest.mark.parametrize("name", ["planforge", "planforge-runtime"])
def test_a_message_names_the_distribution_that_is_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(asked: str) -> object:
        if asked != name:
            raise PackageNotFoundError(asked)
        return object()

    monkeypatch.setattr("importlib.metadata.distribution", find)
    assert suggest_install("cpu") == f"pip install '{name}[cpu]'"
