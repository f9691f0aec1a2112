"""The model that a bundle's graphs are compared with: ours in PyTorch, transformers', or optimum's graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard
from weakref import WeakKeyDictionary

import numpy as np

from ..runtime.backends.backend import Array
from .errors import CheckpointError, VerificationError, raise_checkpoint_errors, shorten_error
from .imported.branches import SWITCH
from .memory import Reclaimer
from .task_traits import CLASS_ENDS, TRAITS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..models.families import Model
    from ..models.weights import Report
    from ..runtime.bundle.defaults import EncoderDefaults
    from .imported.folder import Folder

    ReferenceModel: TypeAlias = "nn.Module | OnnxGraphs"

# Of each model that was loaded here: its weights, by name, as its checkpoint's files hold them.
_published: WeakKeyDictionary[nn.Module, Mapping[str, nn.Parameter]] = WeakKeyDictionary()


class OnnxGraphs:
    """The opened graphs of a folder."""

    reference = "the graphs that optimum wrote"

    def __init__(self, found: Folder) -> None:
        from .imported.folder import LAYERS
        from .imported.unrounded import open_unrounded
        from .passes.unrounded import list_rounding

        self.found = found
        self.layers = found.read_integer(LAYERS) or 0
        self.model = open_unrounded(found.first or found.model)
        self.encoder = None if found.encoder is None else open_unrounded(found.encoder)
        # To compare how nodes are quantized; an encoder-decoder's several graphs are not.
        self.graph = found.read if found.encoder is None else None
        self.rounds = any(map(list_rounding, found.graphs.values()))

    def named_parameters(self, **options: Any) -> Iterator[tuple[str, Tensor]]:
        """Return no parameters: the weights do not have a checkpoint's names."""
        del options
        return iter(())

    named_buffers = named_parameters

    def run(self, given: Mapping[str, Array]) -> dict[str, Array]:
        """Return every output, computed without a past; inputs that are not given are made from the ids."""
        ids = given["input_ids"]
        feeds = dict(given)
        for spec in self.model.get_inputs():
            if spec.name.startswith("past"):
                heads = spec.shape[1]  # of (B, H, P, D)
                size = spec.shape[3]
                feeds[spec.name] = np.zeros((len(ids), heads, 0, size), np.float32)
        feeds.setdefault("attention_mask", np.ones_like(ids))
        feeds.setdefault("token_type_ids", np.zeros_like(ids))
        feeds["position_ids"] = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        feeds[SWITCH] = np.array([False])
        names = [spec.name for spec in self.model.get_inputs()]
        outputs = [spec.name for spec in self.model.get_outputs()]
        results = self.model.run(outputs, {name: feeds[name] for name in names})
        return dict(zip(outputs, results, strict=True))


def load_our_model(
    folder: Path,
    max_length: int,
    keep_types: bool = False,
    report: Report = lambda done, total: None,
) -> Model:
    """Load a checkpoint into PlanForge's own model, for texts of up to `max_length` tokens.

    `keep_types` leaves its weights in their files, for a model that computes nothing; `report` is told the
    bytes that were read, and those of all.
    """
    from ..models import load_model
    from ..models.checkpoint import limit_context

    with raise_checkpoint_errors():
        model = load_model(folder, keep_types=keep_types, report=report)
        published = model if keep_types else load_model(folder, keep_types=True)
    limit_context(model, max_length)
    _published[model] = dict(published.named_parameters())
    for name, parameter in model.named_parameters():
        if _published[model][name].dtype == parameter.dtype:  # so that the file is not mapped twice
            parameter.data = _published[model][name].data
    return model


def load_reference(folder: Path, task: str, encoder: EncoderDefaults | None) -> ReferenceModel:
    """Return transformers' model in fp32, for the first head or else the task; or the folder's graphs."""
    from .imported.folder import has_weights, read_folder

    if not has_weights(folder):
        return OnnxGraphs(read_folder(folder))
    try:
        import transformers
        from transformers.utils import logging as progress
    except ImportError as error:
        raise VerificationError(
            "comparing an imported model needs transformers: pip install transformers"
        ) from error
    import torch

    progress.disable_progress_bar()
    heads = encoder.heads if encoder else ()
    name = f"AutoModel{CLASS_ENDS[heads[0]]}" if heads else TRAITS[task].auto_model
    auto = getattr(transformers, name)
    try:
        model = auto.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    except Exception as error:  # transformers raises whatever a file brings it to
        raise CheckpointError(f"transformers cannot load {folder}: {shorten_error(error)}") from error
    replace_conv1d(model)
    module: nn.Module = model.eval().requires_grad_(False)
    return module


def replace_conv1d(model: nn.Module) -> None:
    """Replace GPT-2's Conv1D, whose weight is transposed, by linear layers, so all weights are (N, K)."""
    from torch.nn import Linear, Parameter
    from transformers.pytorch_utils import Conv1D

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Conv1D):
                linear = Linear(*child.weight.shape)
                linear.weight = Parameter(child.weight.T.contiguous())
                linear.bias = child.bias
                setattr(module, name, linear)


def find_published(model: nn.Module) -> Mapping[str, nn.Parameter]:
    """Return a model's weights as its checkpoint's files hold them, by name; nothing for other models."""
    return _published.get(model, {})


def offload_weights(model: ReferenceModel) -> None:
    """Exchange the fp32 weights of a model of ours for those in the files of its checkpoint.

    One in half precision takes no memory so. Until `restore_weights` the model computes nothing, but its
    weights can be read. Other models stay as they are.
    """
    if is_module(model):
        published = find_published(model)
        for name, parameter in model.named_parameters():
            if name in published:
                parameter.data = published[name].data


def restore_weights(model: ReferenceModel) -> None:
    """Give a model its fp32 weights again; one that has them stays as it is."""
    import torch

    if is_module(model):
        reclaimer = Reclaimer()
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.float32).contiguous()
            reclaimer.count(parameter.nbytes)


def is_module(model: ReferenceModel) -> TypeGuard[nn.Module]:
    """Tell whether a model is a PyTorch module, whose parts can be read and rounded."""
    from torch import nn

    return isinstance(model, nn.Module)
