"""Writes what a new family of Llama's kind needs, from a config.json, to be finished by a person.

    python docs/examples/new_family.py FOLDER/config.json

It prints the row for models/llama_families.py, the tiny checkpoint for tests/helpers/llamas.py, and the
command that runs its test. Lines that end in "?" are to be decided: docs/add-a-model.md says how.
"""

import json
import sys
from pathlib import Path
from typing import Any

import transformers

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
IN_TRAINING = ("attention_dropout", "hidden_dropout", "initializer_range", "residual_dropout", "use_cache")


def main(path: Path) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    kind = config["model_type"]
    own = transformers.CONFIG_MAPPING[kind]
    usual = transformers.PreTrainedConfig().to_dict()
    defaults = own().to_dict()
    llama = transformers.LlamaConfig().to_dict()
    name = own.__name__.removesuffix("Config")
    others = {
        key: value
        for key, value in defaults.items()
        if key not in usual and key not in SIZES and key not in IN_TRAINING and not key.endswith("_token_id")
    }
    differ = {key: value for key, value in others.items() if key in llama and value != llama[key]}
    unknown = {key: value for key, value in others.items() if key not in llama}
    print_row(kind, name, differ, unknown)
    print_checkpoint(kind, name, unknown, config)


def print_row(kind: str, name: str, differ: dict[str, Any], unknown: dict[str, Any]) -> None:
    """Print the row: what a config.json may leave out, and settings that Llama has not."""
    print("models/llama_families.py:\n")
    print(f'    "{kind}": LlamaFamily(')
    print(f'        class_name="{name}",')
    if differ or unknown:
        print("        defaults={")
        for key, value in {**differ, **unknown}.items():
            print(f'            "{key}": {value!r},')
        print("        },")
    if unknown:
        print("        settings={")
        for key in unknown:
            print(f'            "{key}": "a field of LlamaConfig?",')
        print("        },")
    print("    ),")


def print_checkpoint(kind: str, name: str, unknown: dict[str, Any], config: dict[str, Any]) -> None:
    """Print the tiny checkpoint, with values that are not the defaults, and the command of its test."""
    label = kind.replace("_", "-")
    settings = {}
    for key, value in unknown.items():
        given = config.get(key, value)
        if isinstance(given, bool):
            given = not value
        settings[key] = given
    print(f'\ntests/helpers/llamas.py:\n\n    "{label}": ("{name}", {settings!r}),')
    print(f'\ntests/models/test_llama.py: add "{label}" to LEAVING_OUT\n')
    print(f"    .venv/bin/pytest tests/models/test_llama.py -k {label}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
