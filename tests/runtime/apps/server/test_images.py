"""Pictures by HTTP and by OpenAI's client, beside those of the runtime's own calls."""

from __future__ import annotations

import base64
import io
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openai
import PIL.Image
import pytest

from planforge.runtime import ImageGenerator
from planforge.runtime.apps.server import ServerSettings
from planforge.runtime.apps.server.answers import ImageEvent, ImagesAnswer
from planforge.runtime.errors import ClosedError, DeadlineError
from planforge.runtime.images.pictures import Picture, Pixels

from ....helpers.patience import PATIENCE
from ....helpers.serving import Address, running_server

GENERATIONS = "/v1/images/generations"
EDITS = "/v1/images/edits"
OPTIONS: dict[str, Any] = {"steps": 2, "seed": 7}


@pytest.fixture(scope="module")
def model(picture_bundle: Path) -> Iterator[ImageGenerator]:
    with ImageGenerator.load(picture_bundle, precision="fp32") as opened:
        yield opened


@pytest.fixture(scope="module")
def address(model: ImageGenerator) -> Iterator[Address]:
    with running_server({"sd": model}) as opened:
        yield opened


@pytest.fixture(scope="module")
def start() -> bytes:
    """The file of a picture to begin with."""
    random = np.random.default_rng(0)
    return Picture(random.integers(0, 256, (32, 40, 3), dtype=np.uint8)).encode()


def decode(entry: Any) -> Pixels:
    """Return the pixels of a picture in base64."""
    data = entry["b64_json"] if isinstance(entry, dict) else entry.b64_json
    return np.asarray(PIL.Image.open(io.BytesIO(base64.b64decode(data))))


def read_events(response: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, whose last line says that it is complete."""
    *lines, last = [line for line in response.text.splitlines() if line.startswith("data:")]
    assert last == "data: [DONE]"
    events = [msgspec.json.decode(line.removeprefix("data:")) for line in lines]
    for event in events:
        msgspec.convert(event, ImageEvent)
    return events


def test_pictures_are_those_of_the_runtime(address: Address, model: ImageGenerator) -> None:
    answer = address.ask(
        GENERATIONS, prompt="a red one", n=2, size="40x24", negative_prompt="blue", **OPTIONS
    )
    msgspec.convert(answer, ImagesAnswer)
    expected = model.generate(
        "a red one", num_images=2, height=24, width=40, negative_prompt="blue", **OPTIONS
    )
    assert (answer["size"], answer["output_format"]) == ("40x24", "png")
    assert [one["seed"] for one in answer["data"]] == [7, 7]
    for entry, picture in zip(answer["data"], expected, strict=True):
        np.testing.assert_array_equal(decode(entry), picture.pixels)


def test_edits_take_json_and_forms(address: Address, model: ImageGenerator, start: bytes) -> None:
    expected = model.generate("one", image=start, strength=0.5, steps=4, seed=1)[0].pixels
    options: dict[str, Any] = {"prompt": "one", "strength": 0.5, "steps": 4, "seed": 1}
    (in_json,) = address.ask(EDITS, image=base64.b64encode(start).decode(), **options)["data"]
    np.testing.assert_array_equal(decode(in_json), expected)
    fields = {name: str(value) for name, value in options.items()}
    for name in ("image", "image[]"):
        response = address.client.post(EDITS, data=fields, files={name: ("start.png", start, "image/png")})
        assert response.status_code == 200, response.text
        np.testing.assert_array_equal(decode(response.json()["data"][0]), expected)


def test_openais_client_makes_and_edits_pictures(
    address: Address, model: ImageGenerator, start: bytes
) -> None:
    client = openai.OpenAI(base_url=f"{address.url}/v1", api_key="any")
    made = client.images.generate(
        model="sd", prompt="one", n=1, size="256x256", response_format="b64_json", extra_body=OPTIONS
    )
    expected = model.generate("one", height=256, width=256, **OPTIONS)[0]
    assert made.data is not None
    np.testing.assert_array_equal(decode(made.data[0]), expected.pixels)
    edited = client.images.edit(model="sd", prompt="one", image=start, extra_body=OPTIONS)
    assert edited.data is not None
    np.testing.assert_array_equal(
        decode(edited.data[0]), model.generate("one", image=start, **OPTIONS)[0].pixels
    )
    events = list(
        client.images.generate(
            model="sd", prompt="one", stream=True, partial_images=1, extra_body={"steps": 3, "seed": 7}
        )
    )
    assert [event.type for event in events].count("image_generation.partial_image") == 1
    assert events[-1].type == "image_generation.completed"
    (whole,) = model.generate("one", steps=3, seed=7)
    np.testing.assert_array_equal(decode(events[-1]), whole.pixels)


def test_a_stream_has_steps_and_pictures_on_the_way(
    address: Address, model: ImageGenerator, start: bytes
) -> None:
    previews: list[Pixels] = []
    expected = model.generate(
        "one",
        steps=4,
        seed=1,
        scheduler="ddim",
        on_step=lambda step: previews.append(step.preview()[0].pixels),
    )
    body: dict[str, Any] = {"prompt": "one", "steps": 4, "seed": 1, "scheduler": "ddim", "stream": True}
    events = read_events(address.post(GENERATIONS, **body, partial_images=3))
    steps = [event for event in events if event["type"] == "image_generation.step"]
    assert [event["step"] for event in steps] == [1, 2, 3, 4]
    assert {event["steps"] for event in steps} == {4}
    assert steps[-1]["seconds_left"] == 0
    partial = [event for event in events if event["type"] == "image_generation.partial_image"]
    assert [event["partial_image_index"] for event in partial] == [0, 1, 2]
    for event, pixels in zip(partial, previews, strict=False):
        np.testing.assert_array_equal(decode(event), pixels)
    (complete,) = [event for event in events if event["type"] == "image_generation.completed"]
    assert events[-1] is complete
    np.testing.assert_array_equal(decode(complete), expected[0].pixels)
    edit = {"image": base64.b64encode(start).decode(), **body}
    assert {event["type"] for event in read_events(address.post(EDITS, **edit))} == {
        "image_edit.step",
        "image_edit.completed",
    }


def test_formats(address: Address) -> None:
    for name in ("png", "jpeg", "webp"):
        answer = address.ask(GENERATIONS, prompt="one", output_format=name, **OPTIONS)
        data = base64.b64decode(answer["data"][0]["b64_json"])
        assert PIL.Image.open(io.BytesIO(data)).format == name.upper()


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "prompt", "prompt is missing"),
        ({"size": "98x96"}, "size", "size=98 is not a multiple of 4"),
        ({"size": "9x"}, "size", 'not "9x"'),
        ({"size": "99999x96"}, "size", "size=99999 must be"),
        ({"n": 11}, "n", "n must be at most 10, not 11"),
        ({"steps": 0}, "steps", "steps must be at least 1, not 0"),
        ({"scheduler": "dimm"}, "scheduler", "did you mean 'ddim'?"),
        ({"response_format": "url"}, "response_format", "keeps no pictures"),
        ({"background": "transparent"}, "background", '"auto" or "opaque"'),
        ({"strength": 0.5}, "strength", "'strength' is not supported"),
        ({"mask": "x"}, "mask", "'mask' is not supported"),
    ],
)
def test_what_cannot_be_used_is_named(address: Address, body: Any, param: str, words: str) -> None:
    prompt = {} if param == "prompt" else {"prompt": "one"}
    response = address.post(GENERATIONS, **prompt, **body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_file_that_is_no_picture(address: Address, stream: bool) -> None:
    body = {"prompt": "one", "image": base64.b64encode(b"no picture").decode(), "stream": stream}
    response = address.post(EDITS, **body)
    assert response.status_code == 400
    assert "the picture is not a picture that can be read" in response.json()["error"]["message"]
    response = address.post(EDITS, prompt="one", image="/etc/passwd")  # no path is read
    assert response.status_code == 400
    assert "base64" in response.json()["error"]["message"]


def test_what_does_not_fit_names_a_size_that_does(picture_bundle: Path) -> None:
    with (
        ImageGenerator.load(picture_bundle, precision="fp32", memory_limit=25_000_000) as model,
        running_server({"sd": model}) as address,
    ):
        response = address.post(GENERATIONS, prompt="one", steps=1, size="256x128")
        assert (response.status_code, response.json()["error"]["code"]) == (400, "memory_limit")
        size = re.search(r"What fits: size=(\d+x\d+)", response.json()["error"]["message"])
        assert size is not None
        assert address.ask(GENERATIONS, prompt="one", steps=1, size=size[1])["size"] == size[1]


def test_a_picture_larger_than_the_model_makes_needs_a_size(address: Address) -> None:
    file = io.BytesIO()
    PIL.Image.new("RGB", (600, 90)).save(file, "JPEG")
    body = {"prompt": "one", "image": base64.b64encode(file.getvalue()).decode(), "steps": 2}
    error = address.post(EDITS, **body).json()["error"]
    assert "600 x 90 pixels, and the model makes at most 512 x 512; give a size" in error["message"]
    assert address.ask(EDITS, **body, size="64x32")["size"] == "64x32"


def test_a_picture_that_is_too_large(address: Address) -> None:
    bomb = io.BytesIO()
    PIL.Image.new("1", (16_384, 8_192)).save(bomb, "PNG")
    response = address.post(EDITS, prompt="one", image=base64.b64encode(bomb.getvalue()).decode())
    assert response.status_code == 400
    assert "16384 x 8192 pixels" in response.json()["error"]["message"]


def test_forms_that_cannot_be_read(address: Address, start: bytes) -> None:
    def post(content: bytes, kind: str = "multipart/form-data; boundary=x", **headers: str) -> Any:
        return address.client.post(EDITS, content=content, headers={"content-type": kind} | headers)

    part = b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\none\r\n'
    for content, words in (
        (b"--y\r\n\r\n", "the body is not multipart/form-data that can be read"),
        (part % b"prompt" + b"--x--\r\n", "image is missing"),
        (part % b"prompt" * 2 + b"--x--\r\n", "prompt is given several times"),
        (part % b"colour" + b"--x--\r\n", "'colour' is not supported"),
        (b"".join(part % b"a%d" % index for index in range(99)) + b"--x--\r\n", "Too many fields"),
    ):
        response = post(content)
        assert response.status_code == 400, content
        assert words in response.json()["error"]["message"]
    assert post(b"", "multipart/form-data").status_code == 400
    assert post(b"", "text/plain").status_code == 415
    files = {"image": ("start.png", start, "image/png")}
    refused = address.client.post(GENERATIONS, data={"prompt": "one"}, files=files)
    assert refused.status_code == 415


def test_a_form_of_another_site_is_refused(address: Address, picture_bundle: Path, start: bytes) -> None:
    """A page can send a form to any server without asking it first."""
    files = {"image": ("start.png", start, "image/png")}
    fields = {"prompt": "one", "steps": "2"}
    headers = {"origin": "https://evil.example"}
    refused = address.client.post(EDITS, data=fields, files=files, headers=headers)
    assert refused.status_code == 403
    assert "https://evil.example" in refused.json()["error"]["message"]
    settings = ServerSettings(origins=("https://evil.example",))
    with (
        ImageGenerator.load(picture_bundle) as model,
        running_server({"sd": model}, settings) as open_to_it,
    ):
        assert open_to_it.client.post(EDITS, data=fields, files=files, headers=headers).status_code == 200


def test_a_request_that_takes_too_long_ends_between_steps(address: Address) -> None:
    response = address.post(GENERATIONS, prompt="one", steps=500, size="512x512", timeout=0.2)
    assert response.status_code == 504
    assert address.ask(GENERATIONS, prompt="one", **OPTIONS)  # and the next has its turn


def hold(model: ImageGenerator) -> tuple[Any, threading.Event, Callable[[], None], list[int]]:
    """Submit a request that waits behind its first step; return what lets it go on, and the steps it made."""
    began, goes_on, steps = threading.Event(), threading.Event(), list[int]()

    def wait(step: Any) -> None:
        steps.append(step.number)
        began.set()
        goes_on.wait(PATIENCE)

    future = model.submit("one", steps=50, seed=1, on_step=wait)
    assert began.wait(PATIENCE)
    return future, began, goes_on.set, steps


def test_cancelling_ends_between_steps(model: ImageGenerator) -> None:
    future, _, go_on, steps = hold(model)
    behind = model.submit("one", steps=1, seed=1)
    assert model.count_requests() == (1, 1)
    assert future.cancel()
    go_on()
    (picture,) = behind.result(PATIENCE)
    np.testing.assert_array_equal(picture.pixels, model.generate("one", steps=1, seed=1)[0].pixels)
    assert steps == [1]


def test_a_deadline_and_a_failing_callback_end_one_request(model: ImageGenerator) -> None:
    def fail(step: Any) -> None:
        raise KeyError("mine")

    failed = model.submit("one", steps=5, on_step=fail)
    behind = model.submit("one", steps=1, seed=1)
    with pytest.raises(KeyError, match="mine"):
        failed.result(PATIENCE)
    assert len(behind.result(PATIENCE)) == 1
    future, _, go_on, _ = hold(model)
    late = model.submit("one", steps=1, timeout=0.01)
    threading.Event().wait(0.05)
    future.cancel()
    go_on()
    with pytest.raises(DeadlineError):
        late.result(PATIENCE)


def test_closing_ends_what_runs_and_waits(picture_bundle: Path) -> None:
    model = ImageGenerator.load(picture_bundle, precision="fp32")
    future, _, go_on, _ = hold(model)
    behind = model.submit("one", steps=1)
    closing = threading.Thread(target=model.close)
    closing.start()
    go_on()
    closing.join(PATIENCE)
    for ended in (future, behind):
        with pytest.raises(ClosedError):
            ended.result(PATIENCE)


def test_the_models_entry(address: Address) -> None:
    (entry,) = address.client.get("/v1/models").json()["data"]
    assert entry["capabilities"] == ["images/generations", "images/edits"]
    assert entry["image_size"] == "32x32"
    wrong = address.post("/v1/embeddings", input="one")
    assert wrong.status_code == 400
    assert "'embeddings'" in wrong.json()["error"]["message"]
