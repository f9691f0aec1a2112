"""Translation with a Marian-shaped model: PlanForge, optimum-onnx and PyTorch on the same random weights.

python -m benchmarks.translate --optimum-python PYTHON [--work FOLDER]

PYTHON is of an environment of its own:
pip install torch==2.13.0 'optimum-onnx[onnxruntime]' 'transformers<4.58'
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from planforge.exporter import export

from .common import Peer, write_result

SOURCE_TOKENS, NEW_TOKENS, ROUNDS, THREADS = 24, 32, 7, 2
VOCABULARY, WIDTH, INNER, LAYERS, HEADS, POSITIONS = 58101, 512, 2048, 6, 8, 512
EOS, UNKNOWN, PAD = 0, 1, 58100  # as Helsinki-NLP's checkpoints have them
CASES = {"batch 1, greedy": (1, 1), "batch 8, beam 4": (8, 4)}  # sources, beams

# Each peer gives the token ids of its translations, without the start token; see `common.Peer`.
PLANFORGE = """
import json, sys
from planforge.runtime import load
folder, sources, beams, new, threads = sys.argv[1], json.loads(sys.argv[2]), *map(int, sys.argv[3:6])
model = load(folder, precision="fp32", threads=threads)
texts = [" ".join(f"w{token}" for token in source) for source in sources]
def run():
    found = model.translate(texts, num_beams=beams, min_new_tokens=new, max_new_tokens=new)
    return [translation.token_ids for translation in found]
"""
TRANSFORMERS = """
import json, sys
import torch
folder, sources, beams, new, threads = sys.argv[1], json.loads(sys.argv[2]), *map(int, sys.argv[3:6])
torch.set_num_threads(int(sys.argv[6]) if len(sys.argv) > 6 else threads)
{load}
ids = torch.tensor([[*source, {eos}] for source in sources])
def run():
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
                         num_beams=beams, min_new_tokens=new, max_new_tokens=new)
    return out[:, 1:].tolist()
"""
OPTIMUM = TRANSFORMERS.format(
    eos=EOS,
    load="""
import onnxruntime
from optimum.onnxruntime import ORTModelForSeq2SeqLM
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = threads
model = ORTModelForSeq2SeqLM.from_pretrained(folder, use_cache=True, session_options=options)
""",
)
PYTORCH = TRANSFORMERS.format(
    eos=EOS,
    load="""
from transformers import MarianMTModel
model = MarianMTModel.from_pretrained(folder).eval()
""",
)


def marian(folder: Path) -> Path:
    """A random checkpoint of the shape of opus-mt-en-de, written by transformers; word w17 is token 17."""
    if (folder / "tokenizer.target.json").exists():
        return folder
    import torch
    import transformers

    torch.manual_seed(0)
    tokens = {"eos_token_id": EOS, "pad_token_id": PAD, "decoder_start_token_id": PAD}
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": WIDTH, "max_position_embeddings": POSITIONS}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": LAYERS, f"{side}_attention_heads": HEADS, f"{side}_ffn_dim": INNER}
    settings = {"activation_function": "swish", "scale_embedding": True, "forced_eos_token_id": None}
    config = transformers.MarianConfig.from_dict({**sizes, **tokens, **settings})
    model = transformers.MarianMTModel(config)
    with torch.no_grad():  # else a random tied model repeats one token; this way the last layer moves it on
        model.model.shared.weight.mul_(2)
        for linear in (model.model.decoder.layers[-1].fc1, model.model.decoder.layers[-1].fc2):
            linear.weight.mul_(8)
    model.generation_config = transformers.GenerationConfig(
        **tokens, bad_words_ids=[[PAD]], max_length=POSITIONS
    )
    model.save_pretrained(folder)
    for side in ("source", "target"):
        (folder / f"tokenizer.{side}.json").write_text(tokenizer_json(), encoding="utf-8")
    return folder


def tokenizer_json() -> str:
    """Words w0, w1, ... by their number, split at spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = {EOS: "</s>", UNKNOWN: "<unk>", PAD: "<pad>"}
    words = {special.get(token, f"w{token}"): token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=special[UNKNOWN]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return str(tokenizer.to_str())


def export_with_optimum(python: Path, checkpoint: Path, out: Path) -> Path:
    """Its own ONNX graphs, as its command line writes them."""
    if not (out / "config.json").exists():
        command = ["export", "onnx", "--model", checkpoint, "--task", "text2text-generation-with-past", out]
        subprocess.run([python.with_name("optimum-cli"), *map(str, command)], check=True, capture_output=True)
    return out


def bytes_by_file(folder: Path) -> dict[str, int]:
    """The graphs and weights of a folder; PlanForge's names without the export's id."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".onnx", ".onnx_data", ".data"))
    return {path.name.split("-")[0]: path.stat().st_size for path in files}


def measured_machine() -> dict[str, float]:
    """What THREADS threads read per second, and fp32 operations of a large product; the best of five."""
    array, parts = np.ones(1 << 27, np.float32), THREADS
    matrix = np.ones((3072, 3072), np.float32)
    best_read = best_product = float("inf")
    with ThreadPoolExecutor(parts) as pool:
        for _ in range(5):
            start = time.perf_counter()
            list(pool.map(np.max, np.array_split(array, parts)))
            middle = time.perf_counter()
            matrix @ matrix
            best_read = min(best_read, middle - start)
            best_product = min(best_product, time.perf_counter() - middle)
    return {
        "read_gb_per_s": round(array.nbytes / best_read / 1e9, 1),
        "gflop_per_s": round(2 * len(matrix) ** 3 / best_product / 1e9, 1),
    }


def bound(machine: dict[str, float], sources: int, beams: int) -> dict[str, Any]:
    """The most target tokens/s: the encoder once, then in each step all weights of the decoder and the head.

    Reading the weights bounds few rows, multiplying by them bounds many.
    """
    square, ffn = WIDTH * WIDTH, 2 * WIDTH * INNER
    encoder = LAYERS * (4 * square + ffn + 2 * square)  # and the decoder's keys and values of the source
    decoder = LAYERS * (4 * square + 2 * square + ffn) + VOCABULARY * WIDTH
    rows = sources * beams
    seconds = {
        "reading": NEW_TOKENS * 4 * decoder / machine["read_gb_per_s"] / 1e9,
        "multiplying": NEW_TOKENS * rows * 2 * decoder / machine["gflop_per_s"] / 1e9,
    }
    encoding = sources * SOURCE_TOKENS * 2 * encoder / machine["gflop_per_s"] / 1e9
    by = max(seconds, key=lambda name: seconds[name])
    return {
        "tokens_per_s": round(sources * NEW_TOKENS / (seconds[by] + encoding), 1),
        "of": by,
        "decoder_bytes_per_step": 4 * decoder,
    }


def same_share(one: list[list[int]], other: list[list[int]]) -> float:
    """Of the sequences, how many are equal."""
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


def side_by_side(systems: dict[str, Peer], sources: int) -> dict[str, Any]:
    """Lets the systems take turns; tokens/s, ratios of medians, and how many sequences are the same."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    for _ in range(ROUNDS):
        for name, peer in systems.items():
            answers[name].append(peer.run())
    for peer in systems.values():
        peer.close()
    seconds = {name: [answer["seconds"] for answer in found] for name, found in answers.items()}
    tokens = {name: found[0]["result"] for name, found in answers.items()}
    assert all(len(sequence) == NEW_TOKENS for found in tokens.values() for sequence in found)
    ours = statistics.median(seconds["planforge"])
    return {
        name: {
            "tokens_per_s_median": round(sources * NEW_TOKENS / statistics.median(found), 1),
            "seconds": [round(value, 4) for value in found],
            "planforge_is_faster_by": round(statistics.median(found) / ours, 3),
            "sequences_equal_to_planforge": same_share(tokens[name], tokens["planforge"]),
            "sequences_equal_to_pytorch": same_share(tokens[name], tokens["transformers (PyTorch eager)"]),
            "versions": systems[name].versions,
        }
        for name, found in seconds.items()
    }


def main() -> None:
    """Writes results/translate.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optimum-python", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("build/benchmarks"))
    arguments = parser.parse_args()
    work, python = arguments.work / "marian", arguments.optimum_python
    work.mkdir(parents=True, exist_ok=True)
    checkpoint, bundle = marian(work / "checkpoint"), work / "bundle"
    export(checkpoint, bundle, precision=["fp32"], target=["cpu"], verify=False, force=True)
    peer = export_with_optimum(python, checkpoint, work / "optimum")
    words = np.random.default_rng(0).integers(2, PAD, (8, SOURCE_TOKENS - 1)).tolist()
    machine = measured_machine()
    cases = {}
    for case, (sources, beams) in CASES.items():
        how = (json.dumps(words[:sources]), beams, NEW_TOKENS, THREADS)
        systems = {
            "planforge": Peer(sys.executable, PLANFORGE, bundle, *how),
            "optimum-onnx": Peer(python, OPTIMUM, peer, *how),
            # Its search is torch's, whose threads and ONNX Runtime's may be in each other's way.
            "optimum-onnx, torch on 1 thread": Peer(python, OPTIMUM, peer, *how, 1),
            "transformers (PyTorch eager)": Peer(python, PYTORCH, checkpoint, *how),
        }
        found = side_by_side(systems, sources)
        limit = bound(machine, sources, beams)
        share = found["planforge"]["tokens_per_s_median"] / limit["tokens_per_s"]
        cases[case] = {"systems": found, "bound": limit, "planforge_share_of_bound": round(share, 3)}
    write_result(
        "translate",
        {
            "work": {
                **{"source_tokens": SOURCE_TOKENS, "new_tokens": NEW_TOKENS, "threads": THREADS},
                **{"precision": "fp32", "rounds": ROUNDS},
            },
            "machine": machine,
            "cases": cases,
            "bytes": {"planforge": bytes_by_file(bundle), "optimum-onnx": bytes_by_file(peer)},
        },
    )


if __name__ == "__main__":
    main()
