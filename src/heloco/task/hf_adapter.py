"""A low-rank adapter (LoRA) for a Hugging Face model, made by the library peft: the model is frozen, the adapter is trained."""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash
from safetensors.torch import save_file
from torch import Tensor, nn

from heloco.corpus.libraries import library
from heloco.errors import UserError
from heloco.task.hf import CONFIG, HFModel, drawing_from, open_hf, sentences

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""The files of an adapter of the library peft."""
ALL_LINEAR = "all-linear"
"""peft's word for all linear layers but the head."""
_A = ".lora_A.weight"
_WEIGHT_FILES = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class HFAdapter:
    """What is known of a model with an adapter before it is built."""

    base: HFModel
    rank: int
    alpha: float
    """The adapter's output is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """The names of the layers that get an adapter, or the ends of their names; empty: all linear layers but the head."""

    @property
    def source(self) -> str:
        """The name of the model in a run's config."""
        return self.base.source

    @property
    def context(self) -> int:
        return self.base.context

    @property
    def vocab_size(self) -> int:
        return self.base.vocab_size

    @cached_property
    def digest(self) -> str:
        """The digest of the model's config.json and of its weights: these are frozen, so no checkpoint and no start has them."""
        digest = xxhash.xxh3_128(self.base.digest.encode())
        folder = self.base.folder
        for path in sorted(path for pattern in _WEIGHT_FILES for path in folder.glob(pattern)):
            digest.update(path.name.encode())
            with path.open("rb") as file:
                while part := file.read(1 << 24):
                    digest.update(part)
        return f"{self.base.digest}+{digest.hexdigest()}"

    def build(self, seed: int) -> nn.Module:
        """The folder's model, frozen, with an adapter that changes nothing yet: its matrices A are drawn from this seed, and its
        matrices B are 0."""
        peft = library("peft", "An adapter (lora)", extra="peft")
        model = self.base.build(seed)
        with drawing_from(seed), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a layer that peft handles correctly after its warning
            try:
                adapted = peft.get_peft_model(model, self._config(peft, self.targets))
            except ValueError as error:
                raise UserError(
                    f"peft cannot put an adapter into {self.source} ({str(error).strip().splitlines()[0].rstrip('.')}): "
                    "name layers of the model with --lora-targets, or leave it out for all linear layers."
                ) from error
        return AdaptedModel(adapted.base_model)

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """The adapter with these parameters, as `PeftModel.from_pretrained` reads it."""
        peft = library("peft", "An adapter (lora)", extra="peft")
        weights = {adapter_name(name): tensor.contiguous() for name, tensor in tensors.items() if ".lora_" in name}
        layers = sorted({name.removesuffix(_A).rpartition(".")[2] for name in weights if name.endswith(_A)})
        config = self._config(peft, self.targets or layers)
        config.inference_mode = True
        config.base_model_name_or_path = self.source
        if self.source != str(self.base.folder):  # NAME@COMMIT on the hub
            config.base_model_name_or_path, _, config.revision = self.source.partition("@")
        with sentences(self.source):
            config.save_pretrained(folder)
        save_file(weights, folder / ADAPTER, metadata={"format": "pt"})

    def tokenizer(self) -> str:
        """The tokenizer for the model."""
        return self.base.tokenizer()

    def _config(self, peft: Any, layers: Sequence[str]) -> Any:
        alpha = int(self.alpha) if self.alpha.is_integer() else self.alpha
        targets = list(layers) or ALL_LINEAR
        return peft.LoraConfig(r=self.rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM")


class AdaptedModel(nn.Module):
    """A frozen model with an adapter. Its parameters are those of the adapter alone, with the names that peft gives them: the
    model's own are no part of a run. `base_model.merge_and_unload()` gives the model with the adapter in its weights."""

    def __init__(self, tuner: nn.Module) -> None:
        super().__init__()
        self.base_model = tuner

    def forward(self, tokens: Tensor) -> Any:
        """What the model returns."""
        return self.base_model(tokens)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that are trained."""
        every = super().named_parameters(prefix, recurse, remove_duplicate)
        return ((name, parameter) for name, parameter in every if parameter.requires_grad)

    def get_output_embeddings(self) -> Any:
        """The model's head."""
        return self._model.get_output_embeddings()

    def get_decoder(self) -> Any:
        """What computes the hidden states before the head."""
        return self._model.get_decoder()

    @property
    def _model(self) -> Any:
        return self.base_model.model


def open_model(name: str, *, rank: int | None = None, alpha: float | None = None, targets: list[str] | None = None) -> "Source":
    """The model of this folder or hub name, with an adapter if `rank` is given."""
    hf = open_hf(name)
    if rank is None:
        return hf
    if not hf.has_weights:
        raise UserError(
            f"{hf.source} has no weights, only a {CONFIG}, and an adapter changes a model that was trained: leave --lora out."
        )
    library("peft", "An adapter (lora)", extra="peft")  # says so where it is missing, before anything is done
    return HFAdapter(hf, rank, 2.0 * rank if alpha is None else alpha, tuple(targets or ()))


Source = HFModel | HFAdapter


def adapter_name(name: str) -> str:
    """A parameter's name in the file of an adapter: without the name that the adapter has in the model, as peft writes it."""
    name = re.sub(r"\.modules_to_save\.[^.]+\.", ".", name)  # a module that is trained as a whole
    name = re.sub(r"\.(lora_\w+)\.[^.]+(?=\.(?:weight|bias)$|$)", r".\1", name)
    name = re.sub(r"\.default(?=\.|$)", "", name)  # of other adapters than LoRA
    return name.removesuffix(".weight") if name.endswith(".lora_magnitude_vector.weight") else name
