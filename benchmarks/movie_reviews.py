"""10,605 sentences of movie reviews with a mean rating each, from the sdist of vaderSentiment 3.3.2.

Hutto and Gilbert, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media Text", 2014.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

SDIST = "vaderSentiment==3.3.2"
ARCHIVE = "additional_resources/hutto_ICWSM_2014.tar.gz"
TABLE = "movieReviewSnippets_GroundTruth.txt"


def movie_reviews(folder: Path) -> list[tuple[str, str]]:
    """Return sentences labelled "positive" or "negative", in the file's order; cached in `folder`."""
    cached = folder / TABLE
    if not cached.exists():
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-binary", ":all:", "--no-deps"]
        subprocess.run([*pip, "--disable-pip-version-check", "-d", str(folder), SDIST], check=True)
        (sdist,) = folder.glob("[vV]ader*.tar.gz")
        cached.write_bytes(member(member(sdist.read_bytes(), ARCHIVE), TABLE))
    rows = [line.split("\t") for line in cached.read_text(encoding="utf-8").splitlines()]
    return [(text, "positive" if float(rating) > 0 else "negative") for _, rating, text in rows]


def member(archive: bytes, ending: str) -> bytes:
    """Return the content of the one file of a .tar.gz whose path ends so."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        (entry,) = (e for e in files if e.name.endswith("/" + ending) and "/._" not in e.name)
        content = files.extractfile(entry)
        assert content is not None
        return content.read()


def write_table(folder: Path) -> Path:
    """Write the sentences as a table for `planforge fit-head`."""
    path = folder / "movie_reviews.tsv"
    rows = [f"{text}\t{label}\n" for text, label in movie_reviews(folder)]
    path.write_text("text\tlabel\n" + "".join(rows), encoding="utf-8")
    return path
