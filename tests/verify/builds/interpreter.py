"""A CPython without a GIL, built from Debian's source package: ``python -m tests.verify.builds.interpreter``.

Two are built: one as users have it, and one under ThreadSanitizer. They stand in ``build/freethreaded/`` and stay
there. The system's package sources are not changed: apt is given a list of its own.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "build" / "freethreaded"
#: (package, suite), the best first: a mirror may lack the newest.
SOURCES = (("python3.14", "sid"), ("python3.13", "trixie"))
CONFIGURE = ("--disable-gil", "--disable-test-modules")
KINDS = {"release": (), "tsan": ("--with-thread-sanitizer",)}
#: What stands before a command: ThreadSanitizer needs addresses where it expects them.
PREFIX = {"release": (), "tsan": ("setarch", "-R")}
PACKAGES = ("numpy", "cython>=3.1", "setuptools>=77", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
#: Wheels alone: pip would compile a newer numpy that has none for this interpreter.
PIP = ("-m", "pip", "install", "--disable-pip-version-check", "--root-user-action", "ignore", "--only-binary", ":all:")
#: Without these a CPython is built too, one that cannot download or import what the tests need. -> Debian's packages.
HEADERS = {"openssl/ssl.h": "libssl-dev", "zlib.h": "zlib1g-dev", "ffi.h": "libffi-dev"}
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def python_of(kind: str) -> Path:
    """The interpreter `kind`, one of `KINDS`, whether it is there or not."""
    return FOLDER / kind / ("bin/python3" if kind == "release" else "python")


def missing() -> str | None:
    """Why nothing can run without a GIL here, if it cannot."""
    if all((FOLDER / kind / "made").exists() for kind in KINDS):
        return None
    return "there is no CPython without a GIL here; `make freethreaded` builds it (Debian, 15 minutes)"


def packages() -> Path:
    """Where numpy and the other packages lie, which both interpreters use."""
    return next((FOLDER / "release" / "lib").glob("python3.*/site-packages"))


# ---------------------------------------------------------------------- source


def mirror() -> str:
    """The address from which this machine takes Debian's packages."""
    shown = subprocess.run(["apt-get", "indextargets", "--format", "$(REPO_URI)"], capture_output=True, text=True)
    found = [line for line in shown.stdout.split() if "security" not in line and line.rstrip("/").endswith("debian")]
    return found[0] if found else "http://deb.debian.org/debian/"


def apt(suite: str, *arguments: str, cwd: Path, types: str = "deb-src", **options: str | Path) -> bool:
    """Run apt-get with the sources of `suite` alone and with folders of its own, in `cwd`; whether it went well."""
    state = cwd / "apt" / suite
    for folder in ("lists/partial", "cache/archives/partial"):
        (state / folder).mkdir(parents=True, exist_ok=True)
    listed = state / "suite.sources"
    listed.write_text(f"Types: {types}\nURIs: {mirror()}\nSuites: {suite}\nComponents: main\nSigned-By: {KEYRING}\n")
    options |= {
        "Dir::Etc::sourcelist": listed,
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": state / "lists",
        "Dir::Cache": state / "cache",
        "APT::Sandbox::User": "root",
    }
    given = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
    return subprocess.run(["apt-get", "-q", *given, *arguments], cwd=cwd).returncode == 0


def source() -> Path:
    """The unpacked source, downloaded from the first of `SOURCES` that the mirror has. apt checks its signature."""
    if found := sorted(FOLDER.glob("source/*/configure")):
        return found[-1].parent
    downloads = FOLDER / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    for package, suite in SOURCES:
        print(f"==> taking the source of {package} from Debian's {suite}", flush=True)
        given = ("source", "--download-only", package)
        if not (apt(suite, "update", cwd=downloads) and apt(suite, *given, cwd=downloads)):
            print(f"==> the mirror does not give the source of {package} of {suite}", flush=True)
            continue
        (tarball,) = downloads.glob(f"{package}_*.orig.tar.xz")
        (FOLDER / "source").mkdir(exist_ok=True)
        subprocess.run(["tar", "xf", tarball, "-C", FOLDER / "source"], check=True)
        shutil.rmtree(downloads / "apt", ignore_errors=True)  # lists of all packages, 60 MB
        return source()
    raise RuntimeError(f"[interpreter] no source of {' or '.join(package for package, _ in SOURCES)} can be had")


# ---------------------------------------------------------------------- build


def logged(command: Sequence[str | Path], folder: Path, log: Path) -> None:
    """Run a command whose output goes to a file; its end is shown if it fails."""
    with log.open("a") as out:
        done = subprocess.run(["nice", "-n", "10", *command], cwd=folder, stdout=out, stderr=subprocess.STDOUT)
    if done.returncode:
        raise RuntimeError(f"[interpreter] {command[0]} failed, see {log}:\n{log.read_text()[-2000:]}")


def make(kind: str) -> None:
    """Configure and compile one interpreter, without profiling and link-time optimisation.

    The sanitized one runs where it was compiled: to install it, it would have to compile all of its library.
    """
    prefix = FOLDER / kind
    if (prefix / "made").exists():
        return
    work = prefix / "work" if kind == "release" else prefix
    configure = source() / "configure"
    work.mkdir(parents=True, exist_ok=True)
    log = FOLDER / f"{kind}.log"
    log.unlink(missing_ok=True)
    print(f"==> compiling CPython without a GIL ({kind}), 5 to 10 minutes; {log}", flush=True)
    logged([*PREFIX[kind], configure, "-q", f"--prefix={prefix}", *CONFIGURE, *KINDS[kind]], work, log)
    logged([*PREFIX[kind], "make", "-s", "-j2"], work, log)
    if kind == "release":
        logged(["make", "-s", "install"], work, log)
        logged([python_of(kind), *PIP, *PACKAGES], work, log)
        shutil.rmtree(work)
    (prefix / "made").touch()


def refused() -> str | None:
    """Why the interpreters cannot be built here, if they cannot."""
    if not sys.platform.startswith("linux") or shutil.which("apt-get") is None:
        return "the source comes from Debian by apt-get, which this machine lacks"
    text = "".join(f"#include <{header}>\n" for header in HEADERS)
    if subprocess.run(["gcc", "-E", "-"], input=text, capture_output=True, text=True).returncode:
        return f"pip and numpy need {', '.join(HEADERS)}: apt-get install {' '.join(HEADERS.values())}"
    return None


def main() -> int:
    """Build what is not there yet."""
    if why := refused():
        print(f"[interpreter] {why}", file=sys.stderr)
        return 2
    for kind in KINDS:
        make(kind)
    for kind in KINDS:
        command = [*PREFIX[kind], python_of(kind), "-c", "import sys; print(sys.version)"]
        print(f"==> {kind}: {subprocess.check_output(command, text=True).strip()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
