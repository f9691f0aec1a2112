"""What a bundle needs is added up as its files and configuration say, holds for a process, and decides.

B batch, T tokens
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planforge.exporter.errors import BuildError
from planforge.exporter.tensorrt.build import USUAL
from planforge.exporter.tensorrt.memory import check_plan_memory
from planforge.exporter.tensorrt.plan_graphs import find_plan_graphs
from planforge.exporter.tensorrt.plans import plan_profiles
from planforge.runtime import TextGenerator
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.bundle.manifest import Artifact, Manifest
from planforge.runtime.errors import InputError, MemoryLimitError
from planforge.runtime.memory_budget import describe_fitting, find_largest
from planforge.runtime.memory_needs import count_weight_bytes, parse_size, sum_memory

from ..helpers.cli import error_line, planforge

MB = 10**6
# Python's allocator, the engine and the tokenizer, which the sum leaves out: see `LoadOptions.memory_limit`.
OTHERS = 110 * MB
# Memory of a process, in bytes: before the bundle is loaded, and at most when 8 rows fill the context.
# What was freed before is given back first, so that the model takes no memory that is counted already.
MEASURE = """
import ctypes, json, sys
from pathlib import Path
import planforge.runtime.generate.text_generator
import planforge.runtime.backends.ort_program as program
program.import_onnxruntime()
from planforge.runtime import load

def read(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

ctypes.CDLL(None).malloc_trim(0)
before = read("VmRSS:")
with load(sys.argv[1], backend="ort-cpu", precision="fp32", threads=1, prepared=False) as model:
    rows = int(sys.argv[2])
    model.generate(["a"] * rows, max_new_tokens=int(sys.argv[3]), ignore_eos=True)
    print(json.dumps([before, read("VmHWM:")]))
"""

# What loading a graph allocates, in bytes.
MEASURE_WEIGHTS = """
import ctypes, sys
from pathlib import Path
from planforge.runtime.backends.ort_backend import OrtCpuBackend
from planforge.runtime.bundle.bundle import Bundle

def read():
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

engine = OrtCpuBackend(threads=1)
bundle = Bundle.open(sys.argv[1])
artifact = bundle.manifest.artifact(sys.argv[2])
before = read()
program = engine.open(bundle, artifact)
print(read() - before)
"""


def find(bundle: Path, artifact: str) -> tuple[Manifest, list[Artifact]]:
    opened = Bundle.open(bundle)
    return opened.manifest, [opened.manifest.artifact(artifact)]


def test_the_sum_is_what_the_files_and_the_configuration_say(demo_bundle: Path) -> None:
    """A cache of keys alone, of another type, or a file that counts twice, is another sum."""
    manifest, graphs = find(demo_bundle, "decoder.ort.fp32")
    config = manifest.config
    need = sum_memory(manifest, graphs, 3, 100, True)
    data = sum(path.stat().st_size for name in graphs[0].data for path in [demo_bundle / name])
    assert need.weights == data
    assert need.cache == 3 * 100 * config["n_layer"] * 2 * config["n_embd"] * 4
    # Three of a feed-forward part of four times the width, nine of the width, and each head's scores twice.
    width = 3 * 4 * config["n_embd"] + 9 * config["n_embd"] + 2 * config["n_head"] * 100
    logits = 3 * config["vocab_size"] * 4
    assert need.activations == 3 * 100 * 4 * width + logits
    assert need.total == need.weights + need.cache + need.activations
    half = sum_memory(*find(demo_bundle, "decoder.inplace.fp16"), 3, 100, False)
    assert half.cache * 2 == need.cache and half.weights < need.weights


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/status is Linux's")
def test_a_process_takes_what_the_sum_says(demo_bundle: Path) -> None:
    """Weights are read and the cache is written in every step, so both are in memory at one time.

    The least that a process may take is thus their sum; the most is all of the sum, and what it leaves out.
    """
    rows = 8
    new = 255
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(demo_bundle), str(rows), str(new)],
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    before, peak = json.loads(done.stdout)
    need = sum_memory(*find(demo_bundle, "decoder.ort.fp32"), rows, new, True)
    assert need.weights + need.cache > 30 * MB  # far above what a process's memory varies by
    assert need.weights + need.cache <= peak - before <= need.total + OTHERS


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/status is Linux's")
def test_a_process_holds_as_much_for_weights_in_fp16_as_in_fp32(demo_bundle: Path) -> None:
    """What ONNX Runtime allocates for both is the same; without widening half of it would be less."""
    manifest, graphs = find(demo_bundle, "decoder.portable.fp32")
    taken = {}
    for precision in ("fp32", "fp16"):
        done = subprocess.run(
            [sys.executable, "-c", MEASURE_WEIGHTS, str(demo_bundle), f"decoder.portable.{precision}"],
            capture_output=True,
            encoding="utf-8",
            check=True,
        )
        taken[precision] = json.loads(done.stdout)
    weights = manifest.count_weight_bytes(*graphs)
    assert taken["fp32"] > 0.9 * weights
    assert taken["fp16"] > taken["fp32"] - 0.25 * weights


def test_a_translators_encoder_beams_and_source_count(dates_bundle: Path) -> None:
    """Its encoder reads whole sources and has sizes of its own; beams have a row each, and share a source."""
    manifest, (decoder,) = find(dates_bundle, "decoder.ort.fp32")
    encoder = manifest.artifact("encoder.ort.fp32")
    assert manifest.generation is not None
    sizes = {"encoder_ffn": 700, "encoder_heads": 2}
    manifest = dataclasses.replace(
        manifest,
        config={**manifest.config, **sizes},
        generation=dataclasses.replace(manifest.generation, num_beams=5),
    )
    width = manifest.config["d_model"]
    layers = manifest.config["decoder_layers"]
    for graphs in ([decoder, encoder], [encoder, decoder]):
        for batch, length, read in ((3, 50, 150), (3, 300, 900), (8, 300, 1024), (1, 2000, 2000)):
            need = sum_memory(manifest, graphs, batch, length, True)
            one = layers * 2 * width * 4
            assert need.cache == batch * 5 * length * one + batch * min(length, 64) * one
            source = 4 * read * (3 * 700 + 9 * width + 2 * 2 * length)
            target = 4 * batch * 5 * (3 * 512 + 9 * width + 2 * 4 * length)
            logits = 4 * batch * 5 * manifest.config["target_vocab_size"]
            assert need.activations == source + target + logits
            assert need.weights == sum((dates_bundle / name).stat().st_size for name in encoder.data)


def test_a_recurrent_translators_states_count(recurrent_bundle: Path) -> None:
    """A state has no length; beams have states of their own, and each source those that it begins with."""
    manifest, (decoder,) = find(recurrent_bundle, "decoder.portable.fp32")
    encoder = manifest.artifact("encoder.portable.fp32")
    assert manifest.generation is not None
    manifest = dataclasses.replace(manifest, generation=dataclasses.replace(manifest.generation, num_beams=3))
    config = manifest.config
    memory = 2 * config["encoder_size"]
    size = config["decoder_size"]
    keys = config["attention_size"]
    states = config["decoder_layers"] * size
    # What a layer reads, thrice; three gates; its states, thrice; and keys.
    token = 3 * memory + 3 * memory + 3 * memory + keys
    # The longest source's additive scores: sum and tanh of each key, and the scores twice.
    scores = config["max_positions"] * (2 * keys + 2)
    row = 3 * (config["embedding_size"] + memory + size) + 4 * 3 * size + scores
    for batch, length in ((1, 1), (4, 20)):
        rows = 3 * batch
        need = sum_memory(manifest, [decoder, encoder], batch, length, True)
        assert need.cache == 4 * (2 * rows * states + batch * (states + length * (memory + keys)))
        words = 4 * rows * config["target_vocab_size"]
        assert need.activations == 4 * batch * length * token + 4 * rows * row + words


def test_a_decoders_sum_is_what_its_run_needs(demo_bundle: Path) -> None:
    need = sum_memory(*find(demo_bundle, "decoder.ort.fp32"), 3, 200, True)
    options: Any = {"precision": "fp32", "memory_limit": need.total - 1}
    with TextGenerator.load(demo_bundle, backend="ort-cpu", **options) as model:
        with pytest.raises(MemoryLimitError) as caught:
            model.decoder.check_memory(3, 200)
        assert caught.value.needed == need.total


def test_what_would_fit_is_told_and_fits(demo_bundle: Path) -> None:
    limit = 40 * MB
    with TextGenerator.load(demo_bundle, precision="fp32", memory_limit=limit, backend="ort-cpu") as model:
        with pytest.raises(MemoryLimitError, match=r"beams; a batch of (\d+) or a length of (\d+)") as caught:
            model.decoder.check_memory(8, 250)
        found = re.search(r"a batch of (\d+) or a length of (\d+) would fit", str(caught.value))
        assert found is not None
        batch, length = map(int, found.groups())
        model.decoder.check_memory(batch, 250)
        model.decoder.check_memory(8, length)
        for more in ((batch + 1, 250), (8, length + 1)):
            with pytest.raises(MemoryLimitError):
                model.decoder.check_memory(*more)
    options = (
        "--precision",
        "fp32",
        "--max-new-tokens",
        250,
        "--max-memory",
        "16MB",
        "--backend",
        "ort-cpu",
    )
    done = planforge("run", demo_bundle, "a", *options)
    assert done.returncode == 1
    assert re.search(r"--max-memory is 16\.0 MB\. Generate fewer .*; a length of \d+ would fit", done.stderr)
    assert "smaller batches" not in done.stderr  # it is one text


def test_the_largest_that_fits() -> None:
    for limit in range(12):
        assert find_largest(lambda number, limit=limit: number <= limit, 8) == min(limit, 8)  # type: ignore[misc]
    assert describe_fitting(lambda batch, length: batch * length, 10, 4, 6) == (
        "a batch of 1 or a length of 2 would fit"
    )
    assert describe_fitting(lambda batch, length: batch * length, 0, 4, 6) == ""


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GB", 4 * 10**9),
        ("2GiB", 2**31),
        ("1.5 MB", 1_500_000),
        ("500mb", 5 * 10**8),
        ("7B", 7),
        ("1000000", 10**6),
        ("1KiB", 1024),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size("--max-memory", text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "0.1B", "4 TB", "4GX", "1e9", "nan", "9" * 20])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InputError, match="is not a size; give one such as 500MB, 4GB or 2GiB"):
        parse_size("--max-memory", text)


def test_a_number_without_a_unit_is_no_small_limit() -> None:
    with pytest.raises(InputError, match=r"--max-memory '150' has no unit, so it is 150 bytes; .* 150MB or"):
        parse_size("--max-memory", "150")
    with pytest.raises(InputError, match="has no unit"):
        parse_size("--max-memory", "999999")


def test_commands_refuse_a_board_with_too_little_memory(own_bundle: Path) -> None:
    """A build is refused before it begins: the bundle stays as it is, and no other folder comes."""
    before = {path: path.read_bytes() for path in own_bundle.rglob("*") if path.is_file()}
    line = error_line("build", own_bundle, "--max-memory", "20MB", code=1)
    assert re.search(r"a plan in fp16 needs about [\d.]+ MB on the GPU for batch=8,length=256: ", line)
    assert "--max-memory is 20.0 MB. --max batch=" in line
    assert {path: path.read_bytes() for path in own_bundle.rglob("*") if path.is_file()} == before
    for command in (("bench",), ("run",), ("serve", "--port", "0")):
        name, *options = command
        line = error_line(name, own_bundle, *options, "--max-memory", "1MB", code=1)
        assert "15.0 MB of weights in fp32 and a cache; --max-memory is 1 MB" in line
        assert "is not a size" in error_line(name, own_bundle, *options, "--max-memory", "much")


def test_what_bench_leaves_out_names_its_option(llama_demo_bundle: Path) -> None:
    """Weights in fp32 are larger than the limit, those in int8 are not."""
    manifest, graphs = find(llama_demo_bundle, "decoder.ort.fp32")
    limit = f"{count_weight_bytes(manifest, graphs, widens_half=True)}B"
    options = ("--precision", "fp32,int8", "--prompt-tokens", 2, "--new-tokens", 2, "--threads", 1)
    done = planforge("bench", llama_demo_bundle, *options, "--max-memory", limit)
    assert done.returncode == 0, done.stderr
    assert re.search(r"fp32 is not measured: .*; --max-memory is [\d.]+ MB", done.stderr)


def test_a_plan_that_would_fit_is_not_refused(demo_bundle: Path) -> None:
    """What the message names fits, and one more does not; a plan's own numbers are those of its manifest."""
    bundle = Bundle.open(demo_bundle)
    graphs = find_plan_graphs(bundle, "inplace")

    def derive(lengths: Any) -> Any:
        return plan_profiles(graphs, lengths, USUAL)

    (plan,) = bundle.manifest.plans
    check_plan_memory(bundle, graphs, {}, derive, plan.estimate_memory())
    with pytest.raises(MemoryLimitError) as caught:
        check_plan_memory(bundle, graphs, {}, derive, plan.estimate_memory() - 1)
    assert caught.value.needed == plan.estimate_memory()
    found = re.search(r"--max batch=(\d+) or --max length=(\d+) would fit", str(caught.value))
    assert found is not None
    for name, number, most in (("batch", int(found[1]), 8), ("length", int(found[2]), 256)):
        check_plan_memory(bundle, graphs, {name: number}, derive, plan.estimate_memory() - 1)
        assert number == most - 1
    with pytest.raises(MemoryLimitError, match="No smaller shape alone would fit"):
        check_plan_memory(bundle, graphs, {}, derive, 1000)
    with pytest.raises(BuildError):
        derive({"batch": 9})


def test_another_precision_that_fits_is_named(demo_bundle: Path) -> None:
    """Graphs of two precisions, one of which has shorter profiles than it has in truth."""
    opened = Bundle.open(demo_bundle)
    graphs = find_plan_graphs(opened, "inplace")
    small = dataclasses.replace(graphs[0], precision="w4a16")

    def derive(lengths: Any) -> Any:
        return {**plan_profiles(graphs, lengths, USUAL), **plan_profiles([small], {"length": 16}, USUAL)}

    with pytest.raises(MemoryLimitError, match=r"w4a16 would fit \(--precision\)"):
        check_plan_memory(opened, [*graphs, small], {}, derive, 20 * MB)


def test_inspect_shows_the_sum_of_each_precision(demo_bundle: Path) -> None:
    shown = planforge("inspect", demo_bundle).stdout
    assert "memory on a CPU, without Python, engine and tokenizer" in shown
    need = sum_memory(*find(demo_bundle, "decoder.ort.fp32"), 8, 256, True)
    assert re.search(rf"fp32 +8 x 256 tokens .* {need.total / 1e6:.1f} MB\n", shown)
    half = sum_memory(*find(demo_bundle, "decoder.portable.fp16"), 1, 256, True)  # what a CPU takes of fp16
    assert re.search(rf"fp16 +1 x 256 tokens +{half.weights / 1e6:.1f} MB +{half.cache / 1e6:.1f} MB", shown)
