"""Without its package a module says in one line how to install it."""

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("transformers", "transformers", "transformers"),
        ("accelerate", "accelerate", "transformers"),
        ("lightning", "lightning.pytorch.strategies", "lightning"),
    ],
)
def test_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, module: str, package: str, extra: str
) -> None:
    importlib.import_module(package)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"gossipdp.integrations.{module}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'gossipdp\[{extra}\]'"):
        importlib.import_module(f"gossipdp.integrations.{module}")
