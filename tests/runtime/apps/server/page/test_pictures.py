"""The tab that makes pictures: how far they are, what they look like by then, pictures to begin with."""

from __future__ import annotations

import base64
import io

import PIL.Image

from .....helpers.page import PANEL, Open, error_line, fill, press_button, wait_for_text
from .....helpers.page_answers import make_picture_events
from .....helpers.page_server import CUT, END, PATIENCE, StandIn

TAB = "images-generations"
IMAGE = f"{PANEL}.querySelector('.result img:not([hidden])')"


def give_file(data: bytes) -> str:
    """Return the script that chooses a file of these bytes."""
    content = base64.b64encode(data).decode()
    return (
        "(() => { const files = new DataTransfer();"
        f" files.items.add(new File([Uint8Array.from(atob('{content}'), (c) => c.charCodeAt(0))], 'x.png'));"
        f" {PANEL}.querySelector('input[type=file]').files = files.files; }})()"
    )


def test_steps_and_pictures_on_the_way_are_shown(server: StandIn, open_page: Open) -> None:
    page = open_page(TAB)
    given = {
        "Steps": "3",
        "Width and height": "24x16",
        "How many pictures": "1",
        "How much the text counts": "2.5",
    }
    for label, value in given.items():
        fill(page, label, value)
    press_button(page, "Make it")
    wait_for_text(page, "Waiting for its turn")
    first, partial, *others = make_picture_events(3)
    server.stream(first)
    wait_for_text(page, "Step 1 of 3, about 2 s left")
    assert page.evaluate(f"{PANEL}.querySelector('progress').position") == 1 / 3
    server.stream(partial)
    assert page.wait(f"{IMAGE}?.alt") == "The picture as far as it is"
    assert page.wait(f"{IMAGE}.naturalWidth") == 8
    server.stream(*others, END)
    wait_for_text(page, "8x8 pixels, seed 7")
    assert page.wait(f"{IMAGE}.naturalWidth") == 8
    assert page.evaluate(f"{IMAGE}.alt") == "a red three"
    assert page.evaluate(f"{PANEL}.querySelector('a[download]').download") == "picture-7.png"
    body = server.bodies[0][1]
    assert [body[name] for name in ("steps", "size", "n", "guidance_scale")] == [3, "24x16", 1, 2.5]


def test_a_picture_to_begin_with_is_sent(server: StandIn, open_page: Open) -> None:
    server.answers = {"/v1/images/edits": make_picture_events()}
    page = open_page(TAB)
    fill(page, "How much of it to make anew", "0.5")
    press_button(page, "Make it")
    assert "Choose a picture to begin with" in error_line(page)
    file = io.BytesIO()
    PIL.Image.new("RGB", (100, 57), "orange").save(file, "PNG")
    data = file.getvalue()
    page.evaluate(give_file(data))
    press_button(page, "Make it")
    wait_for_text(page, "8x8 pixels, seed 7")
    ((path, body),) = server.bodies
    assert path == "/v1/images/edits"
    assert base64.b64decode(body["image"]) == data
    assert body["strength"] == 0.5
    assert body["size"] == "32x16"  # no larger than the model's pictures, in steps of 8
    fill(page, "Width and height", "16x8")
    press_button(page, "Make it")
    page.wait(f"!{PANEL}.querySelector('button.main').hidden")
    assert server.bodies[-1][1]["size"] == "16x8"


def test_what_goes_wrong_is_said(server: StandIn, open_page: Open) -> None:
    page = open_page(TAB)
    press_button(page, "Make it")
    server.stream(make_picture_events()[0], {"error": {"message": "No memory.", "param": None}})
    assert "No memory" in error_line(page)
    assert server.left.wait(PATIENCE)  # else this stream would take what the next one is to send
    server.left.clear()
    press_button(page, "Make it")
    server.stream(CUT)
    page.wait(f"{PANEL}.querySelector('.error').textContent.includes('connection ended')")
    press_button(page, "Make it")
    wait_for_text(page, "Waiting for its turn")
    page.press("Escape")
    page.wait(f"!{PANEL}.querySelector('button.main').hidden")
    assert server.left.wait(PATIENCE)
