#!/bin/bash
# Stand-ins for the images of docker-compose.yaml that come from a registry, for machines that reach none: built from
# one Debian 12 image and the package indexes, under the registry's names. They show that the wiring holds, not that
# the official images do. usage: stand_ins.sh BASE (such as debian:bookworm-slim)
set -euo pipefail
base=${1:?name a Debian 12 image}
here=$(cd "$(dirname "$0")" && pwd)
label=hsx.stand-in

build() { # TAG FOLDER [FILE...]: the folder, and files of the repository beside it
  local tag=$1 folder=$2 context; shift 2
  if docker image inspect "$tag" > /dev/null 2>&1 &&
     [ "$(docker image inspect --format "{{index .Config.Labels \"$label\"}}" "$tag")" != true ]; then
    echo "$tag is here and no stand-in: it is used as it is" >&2
    return
  fi
  context=$(mktemp -d)
  cp -r "$here/stand-ins/$folder/." "$@" "$context"
  # a build needs the package indexes, and some engines give a bridge no way out
  docker build --quiet --network host --label "$label=true" --build-arg "BASE=$base" --tag "$tag" "$context"
  rm -rf "$context"
}

build postgres:16 postgres
build redis:7.2-bookworm redis
build apache/airflow:3.3.2 airflow "$here/../../requirements.lock"
