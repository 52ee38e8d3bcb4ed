#!/bin/sh
# On a Mac, before a wheel is made: compile the extension of MLX into the package, for each release in MLX_RELEASES.
# MLX's wheel is that of the macOS for which ours is made, whatever this machine runs. Any failure ends the build.
set -eu
cd "$(dirname "$0")/.."
made=kvpool_backends/mlx/native/built
rm -rf $made mlx-wheels
python -m pip install cython setuptools numpy
python setup.py -q build_ext --inplace
for release in $MLX_RELEASES; do
    python -m pip download --no-deps --only-binary :all: --platform "macosx_${MACOSX_DEPLOYMENT_TARGET%%.*}_0_arm64" \
        --dest "mlx-wheels/$release" "mlx==$release" "mlx-metal==$release"
    python -m pip install --no-deps --force-reinstall "mlx-wheels/$release"/*.whl
    python -m kvpool_backends.mlx.native ship
done
rm -rf mlx-wheels
