#!/bin/sh
# Builds service/ into a folder: build.sh FOLDER [CMAKE OPTION...]
#
# What is missing is installed from Debian's packages where this user may do that. Ends with 3 where it may not, after
# saying what is missing, and with what the build ends with otherwise.
set -eu

folder=$1
shift
source=$(cd "$(dirname "$0")" && pwd)

packages="g++ cmake make nlohmann-json3-dev libjpeg62-turbo-dev libpng-dev libwebp-dev libopencv-imgproc-dev libssl-dev libspdlog-dev \
libcli11-dev libboost1.81-dev libboost-url1.81-dev prometheus-cpp-dev zlib1g-dev \
protobuf-compiler libprotobuf-dev libgrpc++-dev protobuf-compiler-grpc catch2"
case "$*" in *clang++*) packages="$packages clang libclang-rt-14-dev" ;; esac

missing() {
  for package in $packages; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || printf '%s ' "$package"
  done
}

if command -v dpkg-query >/dev/null 2>&1; then
  needed=$(missing)
  if [ -n "$needed" ]; then
    sudo=
    [ "$(id -u)" -eq 0 ] || sudo="sudo -n"
    # shellcheck disable=SC2086 # both are lists
    if { $sudo apt-get update -qq && $sudo env DEBIAN_FRONTEND=noninteractive \
      apt-get install -qq -y --no-install-recommends $needed; } >"${TMPDIR:-/tmp}/trtdet-apt.log" 2>&1; then
      echo "installed for service/: $needed"
    else
      echo "service/ skipped: not installed here, and not to be installed by this user: $needed" >&2
      tail -n 3 "${TMPDIR:-/tmp}/trtdet-apt.log" >&2
      exit 3
    fi
  fi
else
  # Not Debian: CMake says what it does not find.
  for tool in cmake c++; do
    command -v $tool >/dev/null 2>&1 || { echo "service/ skipped: no $tool here" >&2; exit 3; }
  done
fi

mkdir -p "$folder"
cmake -S "$source" -B "$folder" "$@" >"$folder.log" 2>&1 || { cat "$folder.log" >&2; exit 1; }
grep -h 'TensorRT engine' "$folder.log" || true
cmake --build "$folder" --parallel "$(nproc)" >"$folder.log" 2>&1 || { tail -n 60 "$folder.log" >&2; exit 1; }
