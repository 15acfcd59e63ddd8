import doctest
import importlib

import pytest


@pytest.mark.parametrize("module", ["topology", "constants", "promise"])
def test_the_examples_in_the_docstrings_run(module):
    result = doctest.testmod(importlib.import_module(f"gossipdp.graph.{module}"))
    assert result.attempted > 0
    assert result.failed == 0
