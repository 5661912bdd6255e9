#!/bin/sh
# The last step of 'make demo': the service runs a bundle and is asked what is in a picture.
#
#   demo.sh TRTDET_SERVE PYTHON BUNDLE IMAGE
#
# The Python is one that has onnxruntime, whose library the service loads.
set -eu

program=$1
python=$2
bundle=$3
image=$4
command -v curl >/dev/null 2>&1 || { echo "C++ service left out: no curl here that would ask it" >&2; exit 0; }

libraries=$("$python" -c 'import os, onnxruntime; print(os.path.join(os.path.dirname(onnxruntime.__file__), "capi"))')
folder=$(mktemp -d)
service=
trap 'test -z "$service" || kill "$service" 2>/dev/null || true; rm -rf "$folder"' EXIT
"$program" "$bundle" --port 0 --library-folder "$libraries" >"$folder/out" 2>"$folder/log" &
service=$!
until grep -q http "$folder/out"; do
  kill -0 "$service" 2>/dev/null || { tail -n 3 "$folder/log" >&2; exit 1; }
  sleep 0.05
done
url=$(sed 's/^trtdet-serve: \([^ ]*\).*/\1/' "$folder/out")
address="$url/v1/detect?score_threshold=0.5"
echo
cat "$folder/out"
echo "\$ curl --data-binary @$image -H \"Content-Type: image/png\" \"$address\""
curl --silent --show-error --fail-with-body --data-binary "@$image" -H "Content-Type: image/png" "$address"
echo
kill "$service"
wait "$service"
service=
