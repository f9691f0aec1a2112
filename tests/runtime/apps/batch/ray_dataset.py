"""Has Ray Data's actors answer batches, and compares them with the model; test_ray.py runs it."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import ray

from planforge.runtime import TextEncoder
from planforge.runtime.apps.batch import BatchWorker, run_batch

TEXTS = [f"wings lift the plane {number} times" for number in range(400)]


def check_texts(bundle: str, folder: Path) -> None:
    """Actors answer as the model does, each row in its place, and the answers are written and read."""
    rows = [{"key": number, "text": text} for number, text in enumerate([*TEXTS, None, "y" * 1_000_000])]
    answers = ray.data.from_items(rows, override_num_blocks=4).map_batches(
        BatchWorker,
        fn_constructor_args=(bundle, "embed"),
        compute=ray.data.ActorPoolStrategy(size=2),
        num_cpus=1,
        batch_size=64,
    )
    answers.write_parquet(str(folder))
    read = {row["key"]: row for row in ray.data.read_parquet(str(folder)).take_all()}
    assert sorted(read) == list(range(402))
    assert read[400]["error"] == "text is missing" and read[400]["embedding"] is None
    assert read[401]["error"].startswith("text has 1,000,000 bytes")
    with TextEncoder.load(bundle, threads=1) as model:
        vectors = model.embed(TEXTS)
    for number, vector in enumerate(vectors):
        assert read[number]["error"] is None
        np.testing.assert_allclose(read[number]["embedding"], vector, atol=1e-5)


def check_mixed(bundle: str) -> None:
    """A column of anything goes through as it came."""
    column = np.empty(4, dtype=object)
    column[:] = ["wings", None, 3.5, b"\xff"]
    answers = ray.data.from_numpy([column]).map_batches(
        BatchWorker,
        fn_constructor_args=(bundle, "embed"),
        fn_constructor_kwargs={"columns": {"text": "data"}},
        compute=ray.data.ActorPoolStrategy(size=1),
        num_cpus=1,
    )
    rows = answers.take_all()
    assert [row["data"] for row in rows] == column.tolist()
    assert [row["error"] is None for row in rows] == [True, False, False, False]


def check_job(bundle: str, output: Path) -> None:
    """A job of a program that has joined a cluster runs there, and leaves the program its cluster."""
    source = output.with_name("job.txt")
    source.write_text("\n".join(TEXTS))
    assert run_batch(bundle, "embed", source, output, address="auto").rows == len(TEXTS)
    assert ray.is_initialized()


class Telling(BatchWorker):
    """A worker that says how it was made."""

    def __call__(self, batch: Mapping[str, np.ndarray]) -> pa.Table:
        count = len(batch["text"])
        told = {"threads": self.model.threads, "backend": self.model.backend, "made": id(self)}
        return pa.table({name: [value] * count for name, value in told.items()})


def check_actor(bundle: str) -> None:
    """An actor has as many threads as Ray gave it CPUs, and loads the model once for all its batches."""
    rows = ray.data.from_items([{"text": text} for text in TEXTS]).map_batches(
        Telling,
        fn_constructor_args=(bundle, "embed"),
        compute=ray.data.ActorPoolStrategy(size=1),
        num_cpus=2,
        batch_size=50,
    )
    told = rows.take_all()
    assert {(row["threads"], row["backend"]) for row in told} == {(2, "ort-cpu")}
    assert len({row["made"] for row in told}) == 1


def main() -> None:
    ray.data.DataContext.get_current().enable_progress_bars = False  # it sets fields that it calls deprecated
    warnings.simplefilter("error", DeprecationWarning)
    bundle, folder = sys.argv[1:]
    # An actor's warnings are errors too, but for those of what Ray sets in a context of its own.
    filters = "error::DeprecationWarning,ignore::DeprecationWarning:ray.data.context"
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONWARNINGS": filters}},
    )
    check_texts(bundle, Path(folder))
    check_mixed(bundle)
    check_actor(bundle)
    check_job(bundle, Path(folder).with_name("job"))
    ray.shutdown()


if __name__ == "__main__":
    main()
