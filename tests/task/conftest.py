"""Hugging Face models that several files of tests use."""

from pathlib import Path

import pytest


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of tiny models. Only look at them."""
    from support.hf_models import gpt2_config, llama_config, saved

    around = tmp_path_factory.mktemp("models")
    folders = {
        "gpt2": saved(gpt2_config(), around / "gpt2"),  # tied weights, dropout of 0.1
        "llama": saved(llama_config(), around / "llama"),  # buffers that are in no state_dict
        "scratch": around / "scratch",
    }
    gpt2_config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).save_pretrained(folders["scratch"])
    return folders
