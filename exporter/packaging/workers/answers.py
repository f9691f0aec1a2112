"""The part that all workers share: it reads questions, and writes answers and their arrays to files.

A worker is called with the package's folder, a file of questions and a folder for its answers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Answer = dict[str, Any]


class Answers:
    """Writes answers.json, and for each array a file of numbers next to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0

    def keep(self, array: Any) -> Answer:
        """Write an array as float32; return the placeholder for it in the answer."""
        name = f"{self.count}.f32"
        self.count += 1
        values = np.ascontiguousarray(array, np.float32)
        values.tofile(self.folder / name)
        return {"file": name, "shape": list(values.shape)}


def answer_questions(
    open_package: Callable[[str, dict[str, Any], list[Answer]], tuple[str, Any]],
) -> None:
    """Open the package that the command line names, and answer its questions.

    `open_package` gets the folder, the options and all questions; it returns the runtime's version, and an
    object with a method for each kind of question, which gets the question and `Answers`.
    """
    package, questions, out = sys.argv[1:]
    asked = json.loads(Path(questions).read_text(encoding="utf-8"))
    version, opened = open_package(package, asked["options"], asked["questions"])
    answers = Answers(Path(out))
    given = [getattr(opened, question["kind"])(question, answers) for question in asked["questions"]]
    text = json.dumps({"version": version, "answers": given})
    (Path(out) / "answers.json").write_text(text, encoding="utf-8")
