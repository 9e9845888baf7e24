#!/usr/bin/env bash
# The environment of a real SGLang server for a machine without a GPU: .ci/sglang.sh FOLDER. About two minutes and 3 GB.
# The server's own requirements name GPU packages; these are the ones that its CPU paths import.
set -euo pipefail
folder=$1 version=${SGLANG_VERSION:-0.5.20}
python3 -m venv "$folder"
echo "torch==2.13.0" >"$folder/constraints.txt"
"$folder/bin/pip" install -q torch==2.13.0
"$folder/bin/pip" install -q -c "$folder/constraints.txt" -r "$(dirname "$0")/sglang.txt"
"$folder/bin/pip" install -q --no-deps "sglang==$version" torchvision==0.28.0
