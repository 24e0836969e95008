#!/bin/sh
# Prints the path of the first Python >= 3.12 that can make a virtual environment: what the shell calls python3,
# python3.14, python3.13 and python3.12, then pyenv's and uv's own. PYTHON=path names one instead.
# A command that exists is not enough: pyenv's stand-ins fail unless their version is selected, and Debian's python3
# comes without ensurepip.

good='
import sys
if sys.version_info < (3, 12):
    sys.exit(1)
import ensurepip, venv
print(sys.executable)
'

# Exits with the interpreter's path when "$1" will do.
try() {
    found=$("$1" -I -c "$good" 2>/dev/null) && [ -n "$found" ] && echo "$found" && exit 0
    return 1
}

if [ -n "${PYTHON:-}" ]; then
    try "$PYTHON"
    echo "PYTHON=$PYTHON is not a Python >= 3.12 with the modules venv and ensurepip" >&2
    exit 1
fi

for name in python3 python3.14 python3.13 python3.12; do
    try "$name"
done
for path in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python3 \
    "${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/uv/python}"/cpython-3.1[2-9]*/bin/python3; do
    try "$path"
done

cat >&2 <<'END'
jaxserve needs Python 3.12 or newer with the modules venv and ensurepip, and none was found.
Get one in any of these ways, then run make again:
    apt install python3 python3-venv      Debian 13, Ubuntu 24.04 and newer
    uv python install 3.12                https://docs.astral.sh/uv
    pyenv install 3.12                    https://github.com/pyenv/pyenv
or name one you have: make PYTHON=/path/to/python3.12
END
exit 1
