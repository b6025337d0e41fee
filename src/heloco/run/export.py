"""A run's model as one safetensors file, with the names of its state_dict."""

from pathlib import Path

from safetensors.torch import save_file

from heloco.errors import UserError
from heloco.run.disk import disk_errors
from heloco.run.folder import RunFolder


def export_model(folder: RunFolder, out: Path) -> int:
    """Writes the newest checkpoint's outer parameters and buffers; returns the number of parameters. Needs no data."""
    state, tensors = folder.load_model()
    meta = folder.meta()
    named = {block["name"]: tensors[f"parameter.{i}"] for i, block in enumerate(meta["blocks"])}
    count = sum(t.numel() for t in named.values())
    named |= {alias: named[name].clone() for alias, name in meta["tied"].items()}
    named |= {name: tensors[f"buffer.{i}"] for i, name in enumerate(meta["buffers"])}
    if out.is_dir():
        raise UserError(f"{out} is a folder: name the file to write, e.g. --out {out / 'model.safetensors'}.")
    with disk_errors(out, "export again."):
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = out.with_name(f".{out.name}.partial")
        try:
            save_file(named, temporary, metadata={"format": "pt", "method": meta["method"], "arrival": str(state["arrival"])})
            temporary.replace(out)
        finally:
            temporary.unlink(missing_ok=True)
    return count
