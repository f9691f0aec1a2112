"""Reads the checkpoint of g2p-en (https://github.com/Kyubyong/g2p, Apache 2.0): English letters -> phonemes.

    pip download g2p-en==2.1.0 --no-deps && unzip g2p_en-2.1.0-py3-none-any.whl
    python -m planforge.models.g2p g2p_en/checkpoint20.npz build/g2p
    planforge export build/g2p -o build/g2p-bundle

A GRU reads a word's letters and the end token; another begins with its last state, without attention, and
writes at most 20 phonemes. The package looks words up in a dictionary first, which is not a part of this.
"""

from __future__ import annotations

import argparse
import json
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .recurrent import Recurrent, RecurrentConfig
from .recurrent_layers import order_gates
from .saving import save_model

MAX_BYTES = 256 * 2**20  # of the arrays, unpacked
MAX_LETTERS = 64  # of a word, the end token included
MAX_PHONEMES = 20
LETTERS = ["<pad>", "<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz"]
# fmt: off
VOWELS = (  # each with its stress: 0, 1, 2
    "AA", "AE", "AH", "AO", "AW", "AY", "EH", "ER", "EY", "IH", "IY", "OW", "OY", "UH", "UW",
)
CONSONANTS = (
    "B", "CH", "D", "DH", "F", "G", "HH", "JH", "K", "L", "M", "N", "NG", "P", "R", "S", "SH", "T", "TH", "V",
    "W", "Y", "Z", "ZH",
)
# fmt: on
SOUNDS = sorted([*(vowel + stress for vowel in VOWELS for stress in "012"), *CONSONANTS, "UW"])
PHONEMES = ["<pad>", "<unk>", "<s>", "</s>", *SOUNDS]
START = PHONEMES.index("<s>")
END = PHONEMES.index("</s>")
NAMES = tuple(
    [f"{side}_{name}" for side in ("enc", "dec") for name in ("emb", "w_ih", "w_hh", "b_ih", "b_hh")]
    + ["fc_w", "fc_b"]
)


def import_g2p(checkpoint: str | Path, folder: str | Path) -> None:
    """Write a checkpoint of g2p-en as a folder that `load_model` and `planforge export` read.

    Args:
        checkpoint: checkpoint20.npz of the package.
        folder: created if it does not exist.

    Raises:
        ValueError: the file is damaged, or its arrays are not a model's of g2p-en; nothing is written.
    """
    arrays = read_arrays(Path(checkpoint))
    model = make_model(Path(checkpoint), arrays)
    folder = Path(folder)
    save_model(model, folder)
    write_tokenizers(folder)
    generation = {
        "decoder_start_token_id": START,
        "eos_token_id": END,
        "pad_token_id": 0,
        "max_new_tokens": MAX_PHONEMES,
        "num_beams": 1,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def read_arrays(path: Path) -> dict[str, Tensor]:
    """Return the arrays of an .npz file, in float32; nothing is unpickled, and little is unpacked."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > MAX_BYTES:
            raise ValueError(f"{path} unpacks to {size} bytes; at most {MAX_BYTES} are read")
        with np.load(path, allow_pickle=False) as archive:
            missing = [name for name in NAMES if name not in archive.files]
            if missing:
                raise ValueError(f"{path} has no array {missing[0]!r}; give checkpoint20.npz of g2p-en")
            arrays = {name: archive[name] for name in NAMES}
    except (OSError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path} cannot be read as .npz: {error}; install g2p-en again") from error
    for name, array in arrays.items():
        if array.dtype.kind != "f" or not np.isfinite(array).all():
            raise ValueError(f"{path}: {name} must hold finite floats, not {array.dtype}")
    return {name: torch.from_numpy(array.astype(np.float32)) for name, array in arrays.items()}


def make_model(path: Path, arrays: dict[str, Tensor]) -> Recurrent:
    """Return the model that a checkpoint's arrays make up; refuse arrays that do not belong together."""
    for name, array in arrays.items():
        axes = 1 if "_b" in name else 2
        if array.ndim != axes:
            raise ValueError(f"{path}: {name} has {array.ndim} axes, not {axes}")
    letters, embedding = arrays["enc_emb"].shape
    phonemes = len(arrays["dec_emb"])
    if (letters, phonemes) != (len(LETTERS), len(PHONEMES)):
        raise ValueError(
            f"{path} has {letters} letters and {phonemes} phonemes; g2p-en has {len(LETTERS)} and"
            f" {len(PHONEMES)}"
        )
    size = arrays["enc_w_hh"].shape[-1]
    config = RecurrentConfig(
        source_vocab_size=letters,
        target_vocab_size=phonemes,
        embedding_size=embedding,
        encoder_size=size,
        bidirectional=False,
        decoder_size=size,
        bridge="copy",
        attention="none",
        attention_size=1,
        deep_output=False,
        max_positions=MAX_LETTERS,
    )
    model = Recurrent(config)
    gates = {name: order_gates(arrays[name], "gru") for name in NAMES if "_ih" in name or "_hh" in name}
    weights = {
        "source_words.weight": arrays["enc_emb"],
        "target_words.weight": arrays["dec_emb"],
        "encoder.0.weight_input": gates["enc_w_ih"][None],
        "encoder.0.weight_hidden": gates["enc_w_hh"][None],
        "encoder.0.bias": torch.cat([gates["enc_b_ih"], gates["enc_b_hh"]])[None],
        "cells.0.input.weight": gates["dec_w_ih"],
        "cells.0.input.bias": gates["dec_b_ih"],
        "cells.0.hidden.weight": gates["dec_w_hh"],
        "cells.0.hidden.bias": gates["dec_b_hh"],
        "output.weight": arrays["fc_w"],
        "output.bias": arrays["fc_b"],
    }
    for name, parameter in model.named_parameters():
        if weights[name].shape != parameter.shape:
            raise ValueError(
                f"{path}: {name} is {tuple(weights[name].shape)}, the other arrays mean"
                f" {tuple(parameter.shape)}"
            )
    model.load_state_dict(weights)
    return model.eval()


def write_tokenizers(folder: Path) -> None:
    """Write the tokenizer of letters, lower case and without accents as in the package, and phonemes'."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

    for name, words in (("source", LETTERS), ("target", PHONEMES)):
        vocabulary = {word: number for number, word in enumerate(words)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        special = [word for word in words if word.startswith("<")]
        tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
        if name == "source":
            tokenizer.normalizer = normalizers.Sequence(
                [normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
            )
            tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(folder / f"tokenizer.{name}.json"))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Read the checkpoint of g2p-en.")
    parser.add_argument("checkpoint", type=Path, help="checkpoint20.npz")
    parser.add_argument("folder", type=Path, help="output folder")
    args = parser.parse_args()
    import_g2p(args.checkpoint, args.folder)


if __name__ == "__main__":
    main()
