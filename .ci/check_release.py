"""Refuse a release that is not whole: ``python .ci/check_release.py FOLDER``.

Each Python of pyproject.toml has a wheel for each platform, of one version, that of the tag. Each wheel has all
extension modules; those for macOS also have MLX's extension, for each release of MLX that it is made for.
"""

import os
import re
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CIBUILDWHEEL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
PLATFORMS = ("linux_x86_64", "linux_aarch64", "macosx_14_0_arm64", "macosx_15_0_arm64", "macosx_26_0_arm64")
MODULES = {str(path.relative_to(ROOT).with_suffix("")) for path in ROOT.glob("kvpool*/**/*.pyx")}
MLX = "kvpool_backends/mlx/native/built/"


def built_for(name: str) -> tuple[str, str]:
    """Return the ABI and the platform of a wheel; all manylinux tags count as Linux."""
    *_, abi, platforms = name.removesuffix(".whl").split("-")
    return abi, re.sub(r"^manylinux\w*?_(x86_64|aarch64)$", r"linux_\1", platforms.split(".")[0])


def problems_in(wheel: Path) -> list[str]:
    """Return what a wheel lacks."""
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
    modules = {re.sub(r"\.[^/]*\.so$", "", name) for name in libraries}
    missing = [f"{wheel.name} has no {module}" for module in sorted(MODULES - modules)]
    if "macosx" in wheel.name:
        wanted = len(CIBUILDWHEEL["macos"]["environment"]["MLX_RELEASES"].split())
        found = sum(name.startswith(MLX) for name in libraries)
        missing += [f"{wheel.name} has MLX's extension {found} times, not {wanted}"] * (found != wanted)
    return missing


def problems(folder: Path, tag: str = "") -> list[str]:
    """Return what a folder of distributions lacks, and what is too much."""
    wheels, sdists = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    found = [f"{len(sdists)} source distributions, not one"] * (len(sdists) != 1)
    versions = {path.name.removesuffix(".tar.gz").split("-")[1] for path in [*wheels, *sdists]}
    if len(versions) != 1 or tag not in ("", *(f"v{version}" for version in versions)):
        found.append(f"versions {sorted(versions)}, tag {tag or 'none'}")
    abis = [pattern.removesuffix("-*") for pattern in CIBUILDWHEEL["build"].split()]
    wanted = {(abi, platform) for abi in abis for platform in PLATFORMS}
    made = [built_for(wheel.name) for wheel in wheels]
    found += [f"no wheel for {abi} on {platform}" for abi, platform in sorted(wanted - set(made))]
    found += [f"a wheel for {abi} on {platform}, which nobody asked for" for abi, platform in set(made) - wanted]
    return found + [problem for wheel in wheels for problem in problems_in(wheel)]


if __name__ == "__main__":
    tag = os.environ["GITHUB_REF_NAME"] if os.environ.get("GITHUB_REF_TYPE") == "tag" else ""
    found = problems(Path(sys.argv[1]), tag)
    print("\n".join(found) or "every file of the release is there and whole")
    sys.exit(bool(found))
