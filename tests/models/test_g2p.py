"""g2p-en's checkpoint, in random arrays of the same layout, against its own arithmetic in numpy."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from planforge.models import load_model
from planforge.models.g2p import END, LETTERS, MAX_PHONEMES, PHONEMES, START, import_g2p, main
from planforge.models.recurrent import Recurrent

from ..helpers.g2p import pronounce, write_checkpoint

WORDS = ["planforge", "bahdanau", "a", "zyzzyva", "naïve"]


def test_the_phonemes_are_the_packages() -> None:
    assert (len(LETTERS), len(PHONEMES)) == (29, 74)
    assert PHONEMES[:8] == ["<pad>", "<unk>", "<s>", "</s>", "AA0", "AA1", "AA2", "AE0"]
    assert PHONEMES[65:] == ["UW", "UW0", "UW1", "UW2", "V", "W", "Y", "Z", "ZH"]


@torch.no_grad()
def test_pronunciations_are_numpys(tmp_path: Path) -> None:
    arrays = write_checkpoint(tmp_path / "checkpoint.npz")
    import_g2p(tmp_path / "checkpoint.npz", tmp_path / "g2p")
    model = load_model(tmp_path / "g2p")
    assert isinstance(model, Recurrent)
    lengths = set()
    for word in WORDS:
        ids = [LETTERS.index(letter) if letter in LETTERS else 1 for letter in word] + [2]
        source, states = model.encode(torch.tensor([ids]), torch.tensor([len(ids)]))
        token = START
        found: list[int] = []
        while len(found) < MAX_PHONEMES:
            x, states = model.step(torch.tensor([[token]]), states, source)
            token = int(model.output(x).argmax())
            if token == END:
                break
            found.append(token)
        assert found == pronounce(arrays, word)
        lengths.add(len(found))
    assert len(lengths) > 1  # they end at unequal steps


def save(path: Path, arrays: dict[str, npt.NDArray[Any]]) -> None:
    np.savez(path, **arrays)  # type: ignore[arg-type]


def test_bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint.npz"
    arrays = write_checkpoint(path)

    def expect(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            import_g2p(path, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    expect("cannot be read as .npz: .*; install g2p-en again")
    path.unlink()
    expect("cannot be read as .npz")
    save(path, {name: array for name, array in arrays.items() if name != "fc_b"})
    expect("has no array 'fc_b'; give checkpoint20.npz of g2p-en")
    save(path, arrays | {"fc_b": np.full(74, np.nan, np.float32)})
    expect("fc_b must hold finite floats")
    save(path, arrays | {"fc_b": np.zeros(73, np.float32)})
    expect(r"output\.bias is \(73,\), the other arrays mean \(74,\)")
    save(path, arrays | {"enc_emb": arrays["enc_emb"][:28]})
    expect("has 28 letters and 74 phonemes; g2p-en has 29 and 74")
    save(path, arrays | {"enc_emb": arrays["enc_emb"][0]})
    expect("enc_emb has 1 axes, not 2")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("enc_emb.npy", pickle.dumps("never loaded"))
    expect("has no array|cannot be read")
    save(path, arrays)
    monkeypatch.setattr("planforge.models.g2p.MAX_BYTES", 1000)
    expect("at most 1000 are read")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "checkpoint.npz")
    monkeypatch.setattr("sys.argv", ["g2p", str(tmp_path / "checkpoint.npz"), str(tmp_path / "out")])
    main()
    assert (tmp_path / "out" / "model.safetensors").is_file()
