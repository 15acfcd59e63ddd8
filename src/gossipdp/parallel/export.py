"""A module's plain ``state_dict`` as a file for others: torch's own format, or safetensors."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gossipdp.parallel.checkpoint_files import write_tensors, written_whole

TORCH_SUFFIXES = (".pt", ".pth")
SAFETENSORS_SUFFIX = ".safetensors"


def check_name(path: str | os.PathLike[str]) -> None:
    """Raise ValueError for a name that does not tell a format."""
    if Path(path).suffix not in (*TORCH_SUFFIXES, SAFETENSORS_SUFFIX):
        raise ValueError(
            f"{str(path)!r} does not tell the format: let it end in .pt, .pth or .safetensors"
        )


def copied_state(module: nn.Module) -> dict[str, Any]:
    """Copy a module's ``state_dict`` to host memory; tied parameters stay one tensor."""
    copies: dict[tuple[Any, ...], Tensor] = {}
    state: dict[str, Any] = {}
    for name, value in module.state_dict().items():
        if isinstance(value, Tensor):
            key = (value.data_ptr() or name, value.shape, value.stride(), value.dtype)
            if key not in copies:
                copies[key] = value.detach().to("cpu", copy=True)
            value = copies[key]
        state[name] = value
    return state


def write_state(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write a copied state in the format that the name tells, whole or not at all.

    Raises:
        ValueError: safetensors cannot hold something in it.
        OSError: of the file system.
    """
    path = Path(path)
    if path.suffix != SAFETENSORS_SUFFIX:
        with written_whole(path) as file:
            torch.save(state, file)
        return
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name!r} is a {type(value).__name__}, and a safetensors file holds tensors "
                "only: let the name end in .pt"
            )
    write_tensors(path, {name: value.contiguous() for name, value in state.items()}, {})
