#!/bin/sh
# Runs tests with each Python, with the oldest and the newest dependencies that setup.cfg allows:
#
#     tests/matrix.sh FOLDER "3.10 3.13" [argument of pytest ...]
#
# FOLDER gets the virtual environments. uv finds or downloads each Python. The oldest release of a compiled package is
# the first that was published compiled for that Python. Without torch and tools of tests that have
# not been released for every Python; tests that need them skip. Ends with 1 where a test failed, with a line for each
# environment.
set -u
folder=$1 pythons=$2
shift 2
test -x "$folder/uv/bin/uv" || { python3 -m venv "$folder/uv" && "$folder/uv/bin/pip" install --quiet uv; } || exit 2
uv=$folder/uv/bin/uv
compiled=
for package in cryptography faster-coco-eval ml-dtypes numpy onnx onnxruntime opencv-python-headless pillow pydantic-core \
  pyyaml scipy; do
  compiled="$compiled --only-binary $package"
done
failed=0
for python in $pythons; do
  for resolution in lowest-direct highest; do
    place=$folder/$python-$resolution
    rm -rf "$place"
    # shellcheck disable=SC2086
    "$uv" venv --quiet --python "$python" "$place" &&
      "$uv" pip install --quiet --python "$place" --resolution "$resolution" $compiled '.[rtx,sign]' &&
      "$uv" pip freeze --quiet --python "$place" --exclude-editable | grep -v '^trtdet' >"$place.txt" &&
      "$uv" pip install --quiet --python "$place" --constraint "$place.txt" \
        pytest hypothesis pytest-timeout pytest-xdist pycocotools polygraphy &&
      "$uv" pip install --quiet --python "$place" --no-deps -e . || { failed=2; echo "$python $resolution: not installed"; continue; }
    "$place/bin/python" -m pytest -q -n auto --dist loadfile -m "not slow and not benchmark and not tensorrt86" "$@" \
      >"$place.log" 2>&1 || failed=1
    echo "$python $resolution: $(tail -n 1 "$place.log")"
  done
done
exit $failed
