"""Any causal language model of Hugging Face's transformers as the model of the language task: found, built, written again.

The model is transformers' own module, with its own names for the parameters: what a run keeps is what transformers loads.
"""

import hashlib
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heloco.corpus.libraries import library
from heloco.corpus.tokenizer_export import TOKENIZER
from heloco.errors import UserError

CONFIG = "config.json"
WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
"""What transformers looks for in a folder."""
_LIKE_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"}
_SMALL_FILES = ["*.json", "*.jinja"]
_BUILDING = threading.Lock()
"""Held while a model is built: transformers and the generator that it draws from belong to the whole process."""


@dataclass(frozen=True)
class HFModel:
    """What is known of a model before it is built."""

    source: str
    """The name of the model in a run's config: an absolute folder, or NAME@COMMIT on the hub."""
    folder: Path
    context: int
    """How many positions it has."""
    vocab_size: int
    digest: str
    """The digest of the model's config.json: with another one it may be another model, or have other dropout."""

    @property
    def has_weights(self) -> bool:
        return any((self.folder / name).is_file() for name in WEIGHTS)

    def build(self, seed: int) -> nn.Module:
        """The module with the folder's weights, or, where it has none, with those that this seed gives; in float32. The global
        generator stays as it was."""
        auto = transformers().AutoModelForCausalLM
        with drawing_from(seed), sentences(self.source):
            if self.has_weights:
                options = {"dtype": torch.float32, "trust_remote_code": False, "output_loading_info": True}
                model, loading_info = auto.from_pretrained(self.folder, **options)
                self._check_complete(loading_info)
            else:
                model = auto.from_config(read_config(self.folder), dtype=torch.float32, trust_remote_code=False)
            self._check_trainable(model)
        text_config(model.config).use_cache = False  # of keys and values: a generation's need
        module: nn.Module = model
        return module

    def tokenizer(self) -> str:
        """The tokenizer for the model: its own, or bytes for one that is trained from scratch."""
        if (self.folder / TOKENIZER).is_file():
            return str(self.folder / TOKENIZER)
        if self.has_weights:
            raise UserError(f"{self.source} has weights but no {TOKENIZER}: say with --tokenizer what its tokens are.")
        return "bytes"

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """The model with these parameters and buffers, as `from_pretrained` reads it."""
        model: Any = self.build(0)
        fill(model, tensors)
        with sentences(self.source):
            text_config(model.config).use_cache = getattr(text_config(read_config(self.folder)), "use_cache", True)
        save(model, folder)

    def _check_complete(self, loading_info: Mapping[str, Any]) -> None:
        """transformers would draw what is missing at random."""
        if missing_keys := sorted(loading_info["missing_keys"]):
            names = ", ".join(missing_keys[:3]) + (", …" if missing_keys[3:] else "")
            raise UserError(f"The weights of {self.source} lack {names}: save a whole AutoModelForCausalLM there.")

    @torch.no_grad()
    def _check_trainable(self, model: Any) -> None:
        if any(p.dtype is not torch.float32 for p in model.parameters()):
            raise UserError(f"{self.source} has weights that are no plain numbers (quantised ones?): give a model that is not.")
        futures = torch.tensor([[0, 0], [0, 1]])
        [one, other] = logits_of(model.eval()(futures))[:, 0]
        if not torch.allclose(one, other, equal_nan=True):  # as BERT does
            raise UserError(
                f"{self.source} looks at the tokens it should predict: set is_decoder in its {CONFIG}, or give a causal model."
            )


def logits_of(output: Any) -> Tensor:
    """The logits in what a model returned: transformers' output that holds them, or the logits themselves."""
    logits: Tensor = getattr(output, "logits", output)
    return logits


# ---- finding


def open_hf(name: str) -> HFModel:
    """The model of this folder, or of this name on the Hugging Face hub: NAME, or NAME@REVISION."""
    transformers()
    path = Path(name).expanduser()
    if path.is_dir():
        folder = path.resolve()
        source = str(folder)
        _check_folder(folder)
    elif path.exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise UserError(f"{name} is no folder: give one with a Hugging Face model's {CONFIG}, or a name on the hub.")
    else:
        folder = _download(name)
        source = f"{name.partition('@')[0]}@{folder.name}"  # the folder of a snapshot is called as its commit
    with quiet(), sentences(source):
        config = text_config(read_config(folder))
    context, vocab_size = getattr(config, "max_position_embeddings", None), getattr(config, "vocab_size", None)
    if not isinstance(vocab_size, int) or vocab_size < 2:
        raise UserError(f"The {CONFIG} of {source} has no vocab_size: give a causal language model.")
    digest = hashlib.sha256((folder / CONFIG).read_bytes()).hexdigest()
    return HFModel(source, folder, context if isinstance(context, int) else sys.maxsize, vocab_size, digest)


def _check_folder(folder: Path) -> None:
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} holds no Hugging Face model: it has no {CONFIG}.")
    if not any((folder / name).is_file() for name in WEIGHTS):
        for path in sorted(folder.iterdir()):
            if path.suffix in _LIKE_WEIGHTS:  # a user would not expect to start from scratch next to them
                raise UserError(
                    f"{path} is not what transformers reads weights from ({WEIGHTS[0]}): save the whole model there with "
                    "save_pretrained, or remove it to train from scratch."
                )


def _download(name: str) -> Path:
    """The snapshot of a model on the hub, in the hub's own cache."""
    hub = library("huggingface_hub", "A Hugging Face model", extra="hf")
    repository, _, revision = name.partition("@")
    try:
        for weights in ("model*.safetensors", "pytorch_model*.bin"):
            folder = Path(hub.snapshot_download(repository, revision=revision or None, allow_patterns=[weights, *_SMALL_FILES]))
            if any((folder / file).is_file() for file in WEIGHTS):
                return folder
    except Exception as error:  # whatever the HTTP library below raises
        raise UserError(
            f"{name!r} is no folder here, and the Hugging Face hub does not give it ({type(error).__name__}): check the name and "
            "the network, or log in with `hf auth login`."
        ) from error
    raise UserError(f"{name!r} on the Hugging Face hub has no weights that transformers reads: choose another model.")


# ---- dealing with transformers


def transformers() -> Any:
    """The transformers library, imported on demand. Raises UserError if it is missing or older than version 5."""
    module = library("transformers", "A Hugging Face model", extra="hf")
    if int(module.__version__.partition(".")[0]) < 5:
        raise UserError(f"transformers {module.__version__} is too old: pip install 'heloco[hf]' brings 5 or newer.")
    return module


def read_config(folder: Path) -> Any:
    return transformers().AutoConfig.from_pretrained(folder, trust_remote_code=False)


def text_config(config: Any) -> Any:
    """The part that describes the language model, where there are others (for images, say)."""
    return config.get_text_config()


@torch.no_grad()
def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Takes over parameters and buffers by name. Buffers that a model does not save need not be there."""
    saved_names = model.state_dict().keys()
    for kind in (model.named_parameters(), model.named_buffers()):
        for name, ours in kind:
            if name not in tensors and name not in saved_names:
                continue
            if name not in tensors or tensors[name].shape != ours.shape:
                raise UserError(f"The checkpoint does not fit the Hugging Face model ({name}): restore its {CONFIG}.")
            ours.copy_(tensors[name])


def save(model: Any, folder: Path) -> None:
    """Writes a Hugging Face model to a folder, as transformers does, without its progress bars."""
    with quiet():
        model.save_pretrained(folder)


@contextmanager
def quiet() -> Iterator[None]:
    """No bars and no warnings: what matters is a sentence of ours."""
    logging = library("transformers.utils.logging", "A Hugging Face model", extra="hf")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """What is built here draws its numbers from this seed. The global generator stays as it was."""
    with _BUILDING, quiet(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def sentences(source: str) -> Iterator[None]:
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:  # transformers raises about everything: OSError, ValueError, KeyError, RuntimeError, …
        cause = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise UserError(
            f"transformers cannot make a causal language model of {source} ({cause}): fix it, or give another."
        ) from error
