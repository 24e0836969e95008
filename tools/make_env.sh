#!/bin/sh
# Usage: make_env.sh ENV REQUIREMENT. Makes the virtual environment ENV unless a good one is there, and installs
# REQUIREMENT (such as ".[test]") into it in editable form.
set -eu
env=$1
requirement=$2

if ! "$env/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
    python=$("$(dirname "$0")/find_python.sh")
    echo "making $env with $python"
    rm -rf "$env"
    "$python" -m venv "$env"
fi

echo "installing $requirement into $env (a few minutes the first time)"
if ! "$env/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$requirement"; then
    echo "the installation failed; it needs a package index that pip can reach the first time" >&2
    exit 1
fi
