"""Finding backends by name, by environment variable and by entry point."""

import subprocess
import sys
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest

import kvpool_backends
from kvpool.errors import BackendUnavailable
from kvpool_backends import available, load_backend
from kvpool_backends.numpy import NumpyBackend


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv("KVPOOL_BACKEND", raising=False)


@pytest.fixture
def declare(monkeypatch):
    """Pretend that a package declares entry points."""

    def declare(**entries):
        found = [EntryPoint(name, value, "kvpool.backends") for name, value in entries.items()]
        monkeypatch.setattr(kvpool_backends, "entry_points", lambda group: found if group == "kvpool.backends" else [])

    return declare


def test_load_backend_without_a_name_is_the_fast_one_that_is_there(monkeypatch):
    assert load_backend() is load_backend("cpu")
    monkeypatch.setitem(sys.modules, "kvpool_backends.cpu", None)  # makes the import fail
    assert load_backend() is NumpyBackend


def test_load_backend_follows_the_environment(monkeypatch, declare):
    declare(other="kvpool_backends.numpy:NumpyBackend")
    monkeypatch.setenv("KVPOOL_BACKEND", "other")
    assert load_backend() is NumpyBackend
    monkeypatch.setenv("KVPOOL_BACKEND", "none such")
    with pytest.raises(BackendUnavailable, match=r"'none such' \(from KVPOOL_BACKEND\)"):
        load_backend()
    assert load_backend("numpy") is NumpyBackend  # what is asked for by name wins
    monkeypatch.setenv("KVPOOL_BACKEND", "")
    assert load_backend() is load_backend("cpu")


@pytest.mark.parametrize(
    ("name", "cause", "said"),
    [("mlx", ImportError, r"pip install 'kvpool\[mlx\]'"), ("half", OSError, r"libhalf\.so: cannot open")],
)
def test_backend_that_cannot_be_imported_says_what_helps_and_keeps_the_cause(declare, monkeypatch, name, cause, said):
    module = ModuleType("half_installed")

    def broken(name):
        raise OSError("libhalf.so: cannot open shared object file")

    module.__getattr__ = broken
    monkeypatch.setitem(sys.modules, "half_installed", module)
    monkeypatch.setitem(sys.modules, "kvpool_backends.mlx", None)  # makes the import fail
    declare(half="half_installed:Backend")
    with pytest.raises(BackendUnavailable, match=said) as caught:
        load_backend(name)
    assert isinstance(caught.value.__cause__, cause)
    assert available() == ("cpu", "numpy")


def test_entry_point_backends_are_found_and_take_over_no_built_in_name(declare):
    declare(third="kvpool_backends.numpy.backend:NumpyBackend", numpy="json:dumps")
    assert load_backend("third") is load_backend("numpy") is NumpyBackend
    assert "third" in available()


def test_known_names_every_backend_and_imports_none(declare, monkeypatch):
    declare(broken="no_such_module_at_all:Backend", numpy="json:dumps")
    monkeypatch.setitem(sys.modules, "kvpool_backends.mlx", None)
    assert set(kvpool_backends.known()) == {"broken", "cpu", "mlx", "numpy"}
    factory, remedy = kvpool_backends.known()["numpy"]
    assert factory == "kvpool_backends.numpy:NumpyBackend" and "pip install" in remedy


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("cuda", BackendUnavailable, "no backend is called 'cuda'; known are .*numpy"),
        *((name, TypeError, "name must be a str") for name in (1, b"numpy", ["numpy"])),
    ],
)
def test_load_backend_by_another_name_is_refused(name, error, message):
    with pytest.raises(error, match=rf"^\[load_backend\] {message}"):
        load_backend(name)


def test_import_of_the_registry_loads_no_backend():
    loaded = "[m for m in sys.modules if m.startswith(('mlx', 'kvpool_backends.'))]"
    code = f"import sys, kvpool_backends; print({loaded})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
