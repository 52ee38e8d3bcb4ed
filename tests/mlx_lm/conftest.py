"""The model that most tests of the adapter run on."""

import pytest
from mlx_models import on_cpu, tiny_llama


@pytest.fixture(scope="module")
def model():
    with on_cpu():
        return tiny_llama()
