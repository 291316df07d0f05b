# Loaded by utils.bats. Nothing is mocked: real shells, real Python, real venv, real pip,
# with the clone's own pyproject.toml files. What is small is the index: a directory of
# empty wheels with the names and versions of constraints.txt, so that pip resolves and
# installs in a second and nothing is downloaded but hatchling (once a file).

REPO=$(cd "$BATS_TEST_DIRNAME/../.." && pwd -P)

# The real interpreter behind shims and environments.
base_python() { python3 -c 'import os, sys; print(os.path.realpath(sys._base_executable))'; }

# A directory to be the whole PATH: these tools, and the given extra commands.
make_bin() { # DIR [PYTHON]
  mkdir -p "$1"
  local tool
  for tool in awk cat cksum cp date dirname env find grep ln ls mkdir mv readlink rm sed sh \
    bash head id uname zsh sort tail test touch tr; do
    ! command -v "$tool" >/dev/null || ln -sf "$(type -P "$tool")" "$1/$tool"
  done
  [ -z "${2-}" ] || make_script "$1/python3" "exec '$2' \"\$@\""
}

# The command of the environment, with a Python that need not be on PATH.
make_topo() { # DIR
  make_script "$1/ezpz-topo" "PYTHONPATH='$REPO/packages/ezpz-topo/src' exec '$(base_python)' -c \
    'from ezpz_topo._cli import main; raise SystemExit(main())' \"\$@\""
}

make_script() { # FILE LINE...
  printf '%s\n' '#!/bin/sh' "${@:2}" >"$1"
  chmod +x "$1"
}

# Empty wheels; mpich gets an mpiexec as the real one has.
make_wheel() { # DIR [NAME VERSION]...
  python3 - "$@" <<'PY'
import sys, zipfile
folder, *words = sys.argv[1:]
for name, version in zip(words[::2], words[1::2]):
    stem = f"{name.replace('-', '_')}-{version}"
    files = {
        f"{name.replace('-', '_')}/__init__.py": "",
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if name == "mpich":
        files[f"{stem}.data/scripts/mpiexec"] = "#!/bin/sh\necho HYDRA build details:\n"
    record = f"{stem}.dist-info/RECORD"
    with zipfile.ZipFile(f"{folder}/{stem}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            entry = zipfile.ZipInfo(path)
            entry.external_attr = (0o100755 if "scripts" in path else 0o100644) << 16
            wheel.writestr(entry, text)
        wheel.writestr(record, "".join(f"{path},,\n" for path in [*files, record]))
PY
}

make_wheelhouse() { # DIR
  mkdir -p "$1"
  python3 -m pip download -q --only-binary :all: -d "$1" hatchling editables
  # shellcheck disable=SC2046 # names and versions, in turn
  make_wheel "$1" $(sed -n 's/^\([^#=]*\)==/\1 /p' "$REPO/constraints.txt")
}

# Into the site-packages of the private HOME, that the base Python searches.
install_for_user() { # WHEEL...
  HOME=$HOME_DIR PIP_BREAK_SYSTEM_PACKAGES=1 "$PYTHON" -m pip install -q --user --no-warn-script-location --no-index "$@"
}

make_clone() { # DIR
  mkdir -p "$1/scripts"
  cp "$REPO/utils.sh" "$REPO/constraints.txt" "$1"
  cp -r "$REPO/scripts/lib" "$1/scripts"
  # Other tests may run meanwhile, and compile what they import.
  python3 -c 'import shutil, sys
shutil.copytree(*sys.argv[1:], ignore=shutil.ignore_patterns("__pycache__"))' "$REPO/packages" "$1/packages"
}

# shellcheck disable=SC2154 # output and status are set by bats' run
# Run a script in the shell $SH with nothing of our environment. Extra variables are
# given in VARS. Its output holds stdout and stderr together.
in_shell() { # SCRIPT [ARGUMENT...]
  local options=(--norc --noprofile)
  [ "${SH:-bash}" = bash ] || options=(-f)
  run env -i HOME="$HOME_DIR" TMPDIR="$BATS_TEST_TMPDIR" PATH="${BIN_DIR:-$BIN}" PIP_CONFIG_FILE=/dev/null \
    PIP_NO_COMPILE=0 PIP_NO_INDEX=1 PIP_FIND_LINKS="$WHEELS" "${VARS[@]}" \
    "${SH:-bash}" "${options[@]}" -c "$1" "${SH:-bash}" "${@:2}" </dev/null
  printf '%s\nexit status %s, expected %s\n' "$output" "$status" "${EXPECT:-0}" # shown when the test fails
  [ "$status" = "${EXPECT:-0}" ]
}

# A HOME and a working directory of the test's own; VARS are for the shells under test.
fresh_home() { # VARIABLE...
  HOME_DIR=$BATS_TEST_TMPDIR/home VARS=("$@")
  mkdir "$HOME_DIR"
  cd "$BATS_TEST_TMPDIR" || return 1
}

# zsh is optional on a laptop, not in CI.
need_zsh() {
  command -v zsh >/dev/null && return 0
  [ "${CI-}" != true ] || {
    echo 'zsh is not installed, and CI=true'
    return 1
  }
  skip 'zsh is not installed'
}
# A test as two: in bash and in zsh.
in_zsh() { need_zsh && SH=zsh "$@"; }

has() { [[ $output == *"$1"* ]] || { printf 'no "%s" in:\n%s\n' "$1" "$output" && return 1; }; }
has_not() { [[ $output != *"$1"* ]] || { printf '"%s" in:\n%s\n' "$1" "$output" && return 1; }; }
# `! command` alone would not end a test.
no() { ! "$@"; }
