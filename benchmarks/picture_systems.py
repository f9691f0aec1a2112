"""One system's UNet in a process of its own, for `pictures`: python -m benchmarks.picture_systems NAME ORDER.

It answers with facts of what it loaded when its first step is done, and then with the seconds of a step for
each line that it reads. With --prepare it converts the checkpoint instead. PlanForge and optimum open the
whole bundle, text encoder and autoencoder too; diffusers and OpenVINO the UNet alone.
"""

from __future__ import annotations

import json
import sys
import time

STARTED = time.perf_counter()  # before anything else is imported

import importlib.metadata  # noqa: E402
import os  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, TypeAlias  # noqa: E402

THREADS = 2
ROWS = 2  # guidance runs the UNet for a prompt and for what the picture is led away from
TOKENS = 77
WIDTH = 768  # of the text's features
TIME = 500.0
Step: TypeAlias = "Callable[[Any, Any], Any]"


def make_checkpoint(order: dict[str, Any]) -> None:
    """Write random weights of Stable Diffusion 1.5's shape, as diffusers does."""
    import torch
    import transformers
    from diffusers import AutoencoderKL, PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel

    from tests.helpers.diffusion import SCHEDULER, list_special_ids, make_tokenizer

    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = TOKENS
    sizes: dict[str, Any] = {
        **{**list_special_ids(), "vocab_size": 49408, "hidden_size": WIDTH, "intermediate_size": 3072},
        **{"num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": TOKENS},
    }
    pipeline: Any = StableDiffusionPipeline(
        text_encoder=transformers.CLIPTextModel(transformers.CLIPTextConfig(**sizes)).eval(),
        unet=UNet2DConditionModel(sample_size=64, cross_attention_dim=WIDTH, attention_head_dim=8).eval(),
        vae=AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(128, 256, 512, 512),
            layers_per_block=2,
            latent_channels=4,
            sample_size=512,
        ).eval(),
        tokenizer=tokenizer,
        scheduler=PNDMScheduler(**SCHEDULER),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(order["model"])
    write_older_vocabulary(Path(order["model"]) / "tokenizer")


def write_older_vocabulary(folder: Path) -> None:
    """Write a tokenizer's words and merges as older versions of transformers read them."""
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    merges = "".join(f"{' '.join(pair)}\n" for pair in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}", encoding="utf-8")


def prepare_planforge(order: dict[str, Any]) -> None:
    from planforge.exporter import export

    export(order["checkpoint"], order["model"], target="cpu", precision="fp32", verify=False, force=True)


def open_planforge(order: dict[str, Any]) -> Step:
    import numpy as np

    from planforge.runtime import ImageGenerator

    unet = ImageGenerator.load(order["model"], threads=THREADS).parts["unet"]
    times = np.full(ROWS, TIME, np.float32)
    return lambda sample, text: unet.run({"sample": sample, "timestep": times, "text": text})["noise"]


def open_diffusers(order: dict[str, Any]) -> Step:
    import torch
    from diffusers import UNet2DConditionModel

    torch.set_num_threads(THREADS)
    unet = UNet2DConditionModel.from_pretrained(f"{order['checkpoint']}/unet").eval()

    def step(sample: Any, text: Any) -> Any:
        with torch.inference_mode():
            return unet(torch.from_numpy(sample), TIME, torch.from_numpy(text)).sample.numpy()

    return step


def prepare_optimum(order: dict[str, Any]) -> None:
    from optimum.exporters.onnx import main_export

    main_export(order["checkpoint"], order["model"], task="text-to-image", do_validation=False)


def open_optimum(order: dict[str, Any]) -> Step:
    import numpy as np
    import onnxruntime
    from optimum.onnxruntime import ORTStableDiffusionPipeline

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    pipeline: Any = ORTStableDiffusionPipeline.from_pretrained(order["model"], session_options=options)
    time = np.array(TIME, np.float32)

    def step(sample: Any, text: Any) -> Any:
        answer = pipeline.unet(sample, time, text)
        found = answer[0] if isinstance(answer, tuple) else answer.sample
        return np.asarray(found)

    return step


def prepare_openvino(order: dict[str, Any]) -> None:
    import openvino
    import torch
    from diffusers import UNet2DConditionModel

    unet = UNet2DConditionModel.from_pretrained(f"{order['checkpoint']}/unet", return_dict=False).eval()
    side = order["size"] // 8
    example = {
        "sample": torch.randn(ROWS, 4, side, side),
        "timestep": torch.tensor(TIME),
        "encoder_hidden_states": torch.randn(ROWS, TOKENS, WIDTH),
    }
    model = openvino.convert_model(unet, example_input=example)
    openvino.save_model(model, f"{order['model']}/unet.xml", compress_to_fp16=False)


def open_openvino(order: dict[str, Any]) -> Step:
    import numpy as np
    import openvino

    core = openvino.Core()
    core.set_property("CPU", {"INFERENCE_NUM_THREADS": THREADS})
    settings = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    request = core.compile_model(f"{order['model']}/unet.xml", "CPU", settings).create_infer_request()
    names = [one.any_name for one in request.model_inputs]

    def step(sample: Any, text: Any) -> Any:
        values = dict(zip(names, (sample, np.array(TIME, np.float32), text), strict=True))
        request.infer(values)
        return request.get_output_tensor(0).data.copy()

    return step


# By the names of systems: what converts the checkpoint, if it is needed, what opens it, and its packages.
SYSTEMS: dict[str, tuple[Callable[[dict[str, Any]], None] | None, Callable[[dict[str, Any]], Step], str]] = {
    "planforge": (prepare_planforge, open_planforge, "planforge onnxruntime"),
    "diffusers": (None, open_diffusers, "diffusers torch"),
    "optimum": (prepare_optimum, open_optimum, "optimum-onnx onnxruntime diffusers"),
    "openvino": (prepare_openvino, open_openvino, "openvino"),
}


def serve(name: str, order: dict[str, Any]) -> None:
    """Load, make a step, tell, and make another for each line."""
    import numpy as np

    _, open_system, packages = SYSTEMS[name]
    random = np.random.default_rng(0)
    side = order["size"] // 8
    sample = random.standard_normal((ROWS, 4, side, side)).astype(np.float32)
    text = random.standard_normal((ROWS, TOKENS, WIDTH)).astype(np.float32)
    step = open_system(order)
    predicted = step(sample, text)
    facts = {
        "start_s": time.perf_counter() - STARTED,
        "digest": predicted.reshape(-1)[::97].astype(float).tolist(),
        "rms": float(np.sqrt(np.square(predicted.astype(np.float64)).mean())),
        "versions": {package: importlib.metadata.version(package) for package in packages.split()},
        "peak_mb": read_peak(),
    }
    print(json.dumps(facts), flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        step(sample, text)
        print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)


def read_peak() -> int:
    """Return the most memory that this process has had, in MB (Linux)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 // 10**6 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    """Prepare or serve one system."""
    name = sys.argv[1]
    order = json.loads(sys.argv[2])
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    if "--prepare" not in sys.argv:
        serve(name, order)
    elif name == "checkpoint":
        make_checkpoint(order)
    elif (prepare := SYSTEMS[name][0]) is not None:
        prepare(order)


if __name__ == "__main__":
    main()
