"""Any folder of text as bytes: what to train on and what is held out."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gossipdp.workloads.source_text import read_source_text

NUM_PIECES, HELD_OUT_EVERY = 200, 20


@dataclass(frozen=True)
class Text:
    """Bytes, 1-D uint8: to train on, and held out for validation."""

    train: Tensor
    validation: Tensor


def read_text(path: Path | None) -> Text:
    """The text of a folder and all folders in it, or of one file; None: of the standard library.

    A file is text if it is UTF-8 without zero bytes; others are passed over, and so is what lies in
    hidden folders. The files stand one after the other by name, with a zero byte after each; of 200
    equal pieces every twentieth is held out. Of the standard library whole files are, as in
    ``gossipdp demo --workload pystdlib``.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        ValueError: there is no text, or too little to train on some and hold others out.
    """
    if path is None:
        source = read_source_text(Path(sysconfig.get_path("stdlib")))
        return Text(source.train(), source.validation())
    if not path.exists():
        raise FileNotFoundError(f"there is no {path.absolute()}; name a folder of text with --data")
    content = bytearray()
    for file in _files(path):
        text = file.read_bytes()
        if _is_text(text):
            content += text
            content.append(0)
    if len(content) < NUM_PIECES:
        raise ValueError(f"{path} holds {len(content)} bytes of text; name a folder that has more")
    pieces = torch.frombuffer(content, dtype=torch.uint8).tensor_split(NUM_PIECES)
    held_out = HELD_OUT_EVERY // 2
    kinds: tuple[list[Tensor], list[Tensor]] = ([], [])
    for number, piece in enumerate(pieces):
        kinds[number % HELD_OUT_EVERY == held_out].append(piece)
    return Text(torch.cat(kinds[0]), torch.cat(kinds[1]))


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = [
        file
        for file in path.rglob("*")
        if file.is_file() and not any(part[0] == "." for part in file.relative_to(path).parts)
    ]
    return sorted(found)


def _is_text(content: bytes) -> bool:
    if not content or b"\0" in content:
        return False
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True
