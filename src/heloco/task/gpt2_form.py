"""TinyGPT as Hugging Face's GPT-2, which computes the same: only names differ, and matrices that lie transposed there."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from heloco.task.gpt import GPTConfig
from heloco.task.hf import quiet, transformers

_NAMES = {"token": "transformer.wte", "position": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head"}
_IN_BLOCKS = {
    "norm1": "ln_1", "qkv": "attn.c_attn", "out": "attn.c_proj", "norm2": "ln_2", "up": "mlp.c_fc", "down": "mlp.c_proj",
}  # fmt: skip
_TRANSPOSED = ("qkv", "out", "up", "down")


def as_gpt2(config: GPTConfig, state: Mapping[str, Tensor], end_of_text: int | None) -> Any:
    """A GPT2LMHeadModel with a TinyGPT's parameters."""
    library = transformers()
    with quiet():
        model = library.GPT2LMHeadModel(
            library.GPT2Config(
                vocab_size=config.vocab_size,
                n_positions=config.context,
                n_embd=config.width,
                n_layer=config.layers,
                n_head=config.heads,
                activation_function="gelu",  # the exact one
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                tie_word_embeddings=config.tied,
                bos_token_id=end_of_text,
                eos_token_id=end_of_text,
            )
        )
    model.load_state_dict(dict(_renamed(name, tensor) for name, tensor in state.items()))
    return model.eval()


def _renamed(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    if not name.startswith("blocks."):
        module, kind = name.split(".")
        return f"{_NAMES[module]}.{kind}", tensor
    _, block, module, kind = name.split(".")
    transposed = module in _TRANSPOSED and kind == "weight"
    return f"transformer.h.{block}.{_IN_BLOCKS[module]}.{kind}", tensor.T if transposed else tensor
