"""The docs site: the pages of this folder, README as its start, and API pages from the docstrings. `make docs`."""

import re
import shutil
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
METADATA = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
FILES = METADATA["urls"]["Source"] + "/blob/main/"

project, author = "kvpool", METADATA["authors"][0]["name"]
version = release = METADATA["version"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme, html_title = "furo", "kvpool"
default_role = "py:obj"  # a name in `backticks` is a link where there is a page for it
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings have them
autodoc_mock_imports = ["jax", "llguidance", "mlx", "mlx_lm", "torch", "transformers"]
napoleon_numpy_docstring, napoleon_google_docstring = True, False

#: API pages: title, then the objects; of a class with its public methods.
API = {
    "pool": ("Pools and plans", "kvpool Pool Plan Group namespace", "kvpool._core BlockAPI PrefixCache PlanGroup",
             "kvpool.stats PoolStats PrefixStats PageBatchInfo"),
    "errors": ("Errors", "kvpool.errors *"),
    "scheduler": ("Scheduler", "kvpool Scheduler Request Step Output",
                  "kvpool.scheduler SchedulerStats TenantStats Decoding"),
    "backends": ("Backends", "kvpool KVSpec", "kvpool.protocol KVBackend Capabilities StepArrays AttentionOptions",
                 "kvpool.group_storage GroupStorage StateSlots", "kvpool_backends load_backend known"),
    "eviction": ("Eviction", "kvpool.eviction H2O SlidingWindow BlockEviction advise Evictor Memory"),
    "store": ("Stores", "kvpool.store BlockStore BlockLayout Layout Blocks DiskStore MemoryStore TieredStore"),
    "adapters": ("Adapters", "kvpool.adapters.block_pool BlockPool", "kvpool.adapters.prompt_cache PromptCache",
                 "kvpool.adapters.mlx_lm install PagedKV Engine"),
    "testing": ("Testing", "kvpool.testing.conformance check_backend", "kvpool.testing.stores check_store",
                "kvpool.testing.fuzz_target Allocator Checked fuzz_target"),
}  # fmt: skip


def api_page(title, *modules):
    """The text of an API page, in reStructuredText."""
    lines = [title, "=" * len(title), ""]
    for module, *names in map(str.split, modules):
        if names == ["*"]:
            lines += [f".. automodule:: {module}", "   :members:", "   :show-inheritance:", ""]
            continue
        for name in names:
            directive = "autoclass" if name[0].isupper() else "autofunction"
            lines += [f".. {directive}:: {module}.{name}", *["   :members:"] * (directive == "autoclass"), ""]
    return "\n".join(lines)


def begin(app):
    """Write the API pages, which are there while the site is built."""
    (HERE / "api").mkdir(exist_ok=True)
    for name, page in API.items():
        (HERE / "api" / f"{name}.rst").write_text(api_page(*page))


def read(app, docname, source):
    """Begin the index with README, and lead links out of this folder to the repository."""
    text = source[0]
    if docname == "index":
        text = (HERE.parent / "README.md").read_text().replace("](docs/", "](") + text
        for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
            text = text.replace(f"]({name}", f"]({FILES}{name}")
    source[0] = text.replace("](../", f"]({FILES}")


def called(app, what, name, obj, options, signature, result):
    """Write a signature as callers read it: no `self`, which Cython has, no private parameter, no path of a module."""
    if signature in (None, "(*args, **kwargs)"):  # of an attribute, of a protocol
        return signature and "", result
    words = re.sub(r"<module '(\w+)' from [^>]*>", r"\1", signature.replace("<factory>", "..."))[1:-1].split(", ")
    return f"({', '.join(word for word in words if word != 'self' and not word.startswith('_'))})", result


def keep(app, what, name, obj, options, lines):
    """Remember the text of an attribute: napoleon would take what stands before a colon for its type."""
    if what in ("attribute", "property"):
        app.kept = name, list(lines)


def restore(app, what, name, obj, options, lines):
    """Undo what napoleon has made of the text of an attribute."""
    if what in ("attribute", "property"):
        assert app.kept[0] == name
        lines[:] = app.kept[1]


def setup(app):
    app.connect("builder-inited", begin)
    app.connect("source-read", read)
    app.connect("autodoc-process-signature", called)
    app.connect("autodoc-process-docstring", keep, priority=499)  # napoleon: 500
    app.connect("autodoc-process-docstring", restore, priority=501)
    app.connect("build-finished", lambda app, error: shutil.rmtree(HERE / "api"))
