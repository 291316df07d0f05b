#!/usr/bin/env bats
# utils.sh in real shells. `bats tests/shell` from the repository's root; with
# EZPZ_TEST_FULL=1 also the real install (torch: minutes, gigabytes on some machines).

bats_require_minimum_version 1.5.0
load test_helper

setup_file() {
  PYTHON=$(base_python)
  export PYTHON
  export WHEELS=$BATS_FILE_TMPDIR/wheels BIN=$BATS_FILE_TMPDIR/bin BARE=$BATS_FILE_TMPDIR/bare
  # Installed once and shared by the tests that only look at it or call again.
  export CLONE="$BATS_FILE_TMPDIR/it's a clone" BUILT_LOG=$BATS_FILE_TMPDIR/built.log
  make_bin "$BIN" "$PYTHON"
  make_bin "$BARE"
  make_wheelhouse "$WHEELS"
  make_clone "$CLONE"
  HOME_DIR=$BATS_FILE_TMPDIR/home VARS=()
  mkdir "$HOME_DIR"
  # Made in a PBS job, another environment on PATH: PBS's profile puts its own mpiexec there, a shell
  # script that starts no MPI (OpenPBS 23.06).
  local job=$BATS_FILE_TMPDIR/job
  "$PYTHON" -m venv --without-pip "$job/own"
  make_wheel "$job" torch 2.8.0+own
  "$PYTHON" -m zipfile -e "$job"/torch-*.whl "$job"/own/lib/python*/site-packages
  mkdir "$job/pbs"
  make_script "$job/pbs/mpiexec" 'echo pbs_version = 23.06.06'
  BIN_DIR=$job/own/bin:$job/pbs:$BIN in_shell 'source "$1/utils.sh" && ezpz_setup_env && command -v mpiexec' "$CLONE"
  printf '%s\n' "$output" >"$BUILT_LOG"
}

setup() {
  NEW=$BATS_TEST_TMPDIR/clone
  fresh_home
}

# --- sourcing

sourcing_only_defines_functions() {
  in_shell '
    snapshot() {
      if [ -n "${ZSH_VERSION-}" ]; then typeset + ; print -l ${(k)functions} ${(k)aliases}; setopt; trap
      else compgen -v; declare -F; shopt -p; alias; trap; fi | sort | grep -vxE "_|.*(BASH_LINENO|FUNCNAME|LINENO|RANDOM|SECONDS|EPOCH.*|BASH_ARG.)"
      set +o; printf "%s\n" "$PWD" "$PATH"
    }
    snapshot >before 2>&1; source "$1/utils.sh"; source "$1/utils.sh"; snapshot >after 2>&1
    grep -vxFf before after' "$CLONE"
  local line
  for line in "${lines[@]}"; do
    [[ $line =~ ^(declare -f )?_?ezpz_[a-z_]+$ ]] || { echo "new: $line" && return 1; }
  done
  has ezpz_setup_env
}
@test "bash: sourcing, twice, adds functions and nothing else" { sourcing_only_defines_functions; }
@test "zsh: sourcing, twice, adds functions and nothing else" { in_zsh sourcing_only_defines_functions; }

finds_its_clone() {
  mkdir -p "a b/it's" elsewhere
  cp "$REPO/utils.sh" "a b/it's"
  ln -s "../a b/it's/utils.sh" elsewhere/link.sh
  ln -s "a b" directory
  local way
  for way in "cd a\ b && source \"it's/utils.sh\"" 'source elsewhere/link.sh' "source directory/it\'s/utils.sh" \
    'cd elsewhere && CDPATH=/tmp && source ./link.sh'; do
    in_shell "set -eu; $way; cd /; _ezpz_here"
    [ "$output" = "$(pwd -P)/a b/it's" ] || { echo "$way: $output" && return 1; }
  done
}
@test "bash: knows its directory: relative path, symbolic links, quotes and spaces" { finds_its_clone; }
@test "zsh: knows its directory: relative path, symbolic links, quotes and spaces" { in_zsh finds_its_clone; }

@test "executed instead of sourced: says so and exits 2" {
  local shell
  for shell in bash sh zsh dash; do
    command -v "$shell" >/dev/null || continue
    run -2 "$shell" "$REPO/utils.sh"
    [ "$output" = 'utils.sh: do not execute it; in bash or zsh: source utils.sh' ]
  done
}

@test "ezpz_help lists every public function, also from a pipe" {
  in_shell '. /dev/stdin <<<"$(cat "$1")"; ezpz_help; declare -F | grep -o " ezpz_.*"' "$REPO/utils.sh"
  local name
  for name in $(grep '^ ezpz_' <<<"$output"); do grep -q "^ezpz_.*$name\|^$name" <<<"$output"; done
  has EZPZ_WHEELS
}

# --- no Python, the wrong Python

@test "a Python that is too old is named with its version, and passed over" {
  make_bin old
  make_script old/python3 'echo "(3.9.2) is too old"; exit 1'
  BIN_DIR=$PWD/old EXPECT=1 in_shell 'source "$1/utils.sh" && EZPZ_VENV=$2 ezpz_setup_env' "$CLONE" "$PWD/env"
  has "$PWD/old/python3 (3.9.2) is too old"
  # the next name on PATH is taken; stop at the unwritable place, before the long steps
  make_script old/python3.11 "exec '$PYTHON' \"\$@\""
  touch file
  BIN_DIR=$PWD/old EXPECT=1 in_shell 'source "$1/utils.sh" && EZPZ_VENV=$2 ezpz_setup_env' "$CLONE" "$PWD/file/env"
  has "old/python3.11"
  has "cannot write to $PWD/file/env: set EZPZ_VENV"
}

@test "EZPZ_PYTHON that is not there is an error, not a reason to take another" {
  EXPECT=1 in_shell 'source "$1/utils.sh" && EZPZ_PYTHON=/no/python ezpz_setup_env' "$CLONE"
  has '/no/python does not run'
}

# A folder with our wheels, real ones, and the empty ones of what they need.
@test "from a pipe, without a clone: the released packages, once, whatever the shell; else an error with the remedy" {
  local released=$PWD/released place="$PWD/data dir/ezpz/workstation" shells=(bash)
  ! command -v zsh >/dev/null || shells+=(zsh)
  mkdir nothing && cp -r "$WHEELS" "$released"
  "$CLONE/.venv/bin/python" -m pip wheel -q --no-deps --no-index --no-build-isolation -w "$released" "$CLONE"/packages/*
  for SH in "${shells[@]}"; do
    VARS=(EZPZ_WHEELS="$PWD/nothing")
    EXPECT=1 in_shell 'set -u; . <(cat "$1"); ezpz_get_num_nodes || ezpz_setup_env' "$REPO/utils.sh"
    has 'call ezpz_setup_env'
    has EZPZ_INDEX
    VARS=(EZPZ_WHEELS="$released" XDG_DATA_HOME="$PWD/data dir")
    in_shell 'set -euo pipefail; . <(cat "$1"); ezpz_setup_env; echo again; ezpz_setup_env; ezpz_save_env saved
      echo "$VIRTUAL_ENV $EZPZ_JOB $(command -v ezpz-launch) $(command -v mpiexec)"; ezpz_reset; echo "${VIRTUAL_ENV-none}"' "$REPO/utils.sh"
    [ "$SH" = zsh ] || has "no clone: installing the released ezpz-suite[examples] from $released"
    [[ ${output##*again} != *installing* ]]
    [ "${lines[-2]}" = "$place none $place/bin/ezpz-launch $place/bin/mpiexec" ]
    [ "${lines[-1]}" = none ]
    in_shell 'set -eu; . <(cat "$1"); ezpz_load_env saved; ezpz_get_num_nodes' "$REPO/utils.sh"
    [ "${lines[-1]}" = 1 ]
  done
}

# --- the environment

@test "first call: the seven packages, constrained torch, MPI of the wheel; not PBS's mpiexec, nor another environment's torch" {
  output=$(cat "$BUILT_LOG")
  has 'torch 2.13.0 (installed by pip)'
  has_not 'keeping'
  has 'MPI: mpich 5.0.2'
  [ "$(tail -n 1 "$BUILT_LOG")" = "$CLONE/.venv/bin/mpiexec" ]
  run -0 "$CLONE/.venv/bin/python" -m pip list
  local package
  for package in topo device tp spmd dist launch obs suite; do has "ezpz-$package"; done
  has scikit-learn
  [ -x "$CLONE/.venv/bin/mpiexec" ]
  [ -x "$CLONE/.venv/bin/ezpz-launch" ]
}

second_call() {
  local options
  for options in '' 'set -euo pipefail'; do
    VARS=(EZPZ_LOG_LEVEL=WARNING)
    in_shell "$options"'
      source "$1/utils.sh"; before=$(set +o; trap)
      ezpz_setup_env; was=$PATH
      python -c "import sys; print(sys.prefix)"
      ezpz_setup_env; [ "$PATH" = "$was" ] && echo same path
      PATH=/first:$PATH; ezpz_setup_env; ezpz_setup_env; [ "$PATH" = "$1/.venv/bin:/first:${was#*:}" ] && echo first again
      (unset -f deactivate; ezpz_setup_env; echo "${#PATH}"); echo "${#PATH}"
      [ "$before" = "$(set +o; trap)" ] && echo same options
      echo "${venv-}${root-}${state-}${rest-}${key-}"' "$CLONE"
    [ "${lines[0]}" = "$CLONE/.venv" ]
    [ "${lines[1]} ${lines[2]} ${lines[5]}" = 'same path first again same options' ]
    [ "${lines[3]}" = "${lines[4]}" ]
    [ "${#lines[@]}" = 6 ] # silent at WARNING, and no variable left
  done
}
@test "bash: a second call changes neither PATH nor options, and is silent at WARNING" { second_call; }
@test "zsh: a second call changes neither PATH nor options, and is silent at WARNING" { in_zsh second_call; }

@test "interrupted while the environment is made, or pip runs; pip fails; its Python goes: the next call repairs" {
  make_clone "$NEW"
  make_bin slow
  # the process group is ours: kill the parent when the environment is made
  make_script slow/python3 "case \"\$*\" in *'-m venv'*) mkdir -p '$NEW/.venv/bin'; kill -INT \$PPID; exit 1 ;; esac" "exec '$PYTHON' \"\$@\""
  run env -i HOME="$HOME_DIR" PATH="$PWD/slow" bash -c 'source "$1/utils.sh" && ezpz_setup_env' bash "$NEW"
  [ "$status" -ne 0 ]
  [ ! -e "$NEW/.venv/bin/python" ]
  # pip fails: its last lines, the log, no stamp, no activation
  sed -i.old 's/^fire==.*/fire==99.0/' "$NEW/constraints.txt"
  EXPECT=1 in_shell 'source "$1/utils.sh" && ezpz_setup_env' "$NEW"
  has 'making '
  has 'fire==99.0'
  has "$NEW/.venv/.ezpz/pip.log"
  grep -q '"stamp": ""' "$NEW/.venv/.ezpz/state.json"
  cp "$REPO/constraints.txt" "$NEW"
  # what a Ctrl-C in the middle of pip leaves: files and METADATA, not yet INSTALLER
  local site
  site=$(echo "$NEW"/.venv/lib/python*/site-packages)
  mkdir "$site/torch-2.13.0.dist-info"
  printf 'Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n' >"$site/torch-2.13.0.dist-info/METADATA"
  in_shell 'source "$1/utils.sh" && ezpz_setup_env && command -v python' "$NEW"
  has_not 'making '
  [ "${lines[-1]}" = "$NEW/.venv/bin/python" ]
  [ -e "$site/torch/__init__.py" ]
  # another constraint is another stamp: all is installed again, and here it cannot be
  sed -i.old 's/^fire==.*/fire==98.0/' "$NEW/constraints.txt"
  EXPECT=1 in_shell 'source "$1/utils.sh" && ezpz_setup_env' "$NEW"
  has 'fire==98.0'
  cp "$REPO/constraints.txt" "$NEW"
  # its Python is gone (a module was replaced): recreated, from inside the active environment too
  rm "$NEW/.venv/bin/python" && ln -s /no/python "$NEW/.venv/bin/python"
  VARS=(VIRTUAL_ENV="$NEW/.venv")
  in_shell 'PATH="$VIRTUAL_ENV/bin:$PATH"; source "$1/utils.sh" && ezpz_setup_env && python -c "import ezpz"' "$NEW"
  has 'making '
}

@test "ezpz-tp and torch only, where nothing else is asked for; what was installed for one package is completed" {
  make_clone "$NEW"
  in_shell 'set -eu; source "$1/utils.sh"; ezpz_install ezpz-tp; python -m pip list --format=freeze' "$NEW"
  local word
  for word in ezpz-tp torch==2.13.0; do has "$word"; done
  for word in ezpz-topo mpi4py numpy; do has_not "$word="; done
  in_shell 'set -eu; source "$1/utils.sh"; ezpz_setup_env; command -v ezpz-launch; python -c "import ezpz"' "$NEW"
  [ "${lines[-1]}" = "$NEW/.venv/bin/ezpz-launch" ]
}

@test "a directory that is not ours is never emptied" {
  mkdir precious && touch precious/thesis
  EXPECT=1 in_shell 'source "$1/utils.sh" && EZPZ_VENV=$2 ezpz_setup_env' "$CLONE" "$PWD/precious"
  has 'was not made here'
  [ -e precious/thesis ]
}

@test "an active environment is used as it is: its torch stays, its name too" {
  "$PYTHON" -m venv own
  make_wheel . torch 2.8.0+own
  own/bin/python -m pip install -q --no-index torch-*.whl
  make_clone "$NEW"
  in_shell '. "$2/bin/activate"; source "$1/utils.sh" && ezpz_setup_env && ezpz_setup_env && echo "$VIRTUAL_ENV"' "$NEW" "$PWD/own"
  [ "${lines[-1]}" = "$PWD/own" ]
  has 'torch 2.8.0+own (kept'
  [ ! -e "$NEW/.venv" ]
  [ "$(grep -c 'installing the packages' <<<"$output")" = 1 ]
}

# The user's site-packages belong to the base Python, and an environment sees them only
# with --system-site-packages: as with the torch of a module or of conda.
@test "the site's torch is kept, not shadowed; too old a one is an error; mpiexec on PATH is kept" {
  make_wheel . torch 2.9.0+site numpy 2.1.0
  install_for_user ./*.whl
  make_clone "$NEW"
  mkdir mpi && make_script mpi/mpiexec 'echo HYDRA build details:'
  BIN_DIR=$PWD/mpi:$BIN in_shell 'source "$1/utils.sh" && ezpz_setup_env && command -v mpiexec
    python -c "import torch, numpy; print(torch.__file__, numpy.__file__)"' "$NEW"
  has 'torch 2.9.0+site (kept, from '
  has "MPI: $PWD/mpi/mpiexec"
  [ "${lines[-2]}" = "$PWD/mpi/mpiexec" ]
  [[ ${lines[-1]} == "$HOME_DIR"/*"/torch/__init__.py $HOME_DIR/"* ]]
  run -0 find "$NEW/.venv/lib" -maxdepth 3 -iname 'torch*' -o -maxdepth 3 -iname 'numpy*' -o -maxdepth 3 -iname 'mpich*'
  [ -z "$output" ]
  # asked not to: the shared environment, which has its own torch, still fits
  VARS=(EZPZ_SITE_PACKAGES=0)
  in_shell 'source "$1/utils.sh" && ezpz_setup_env && command -v mpiexec' "$CLONE"
  has_not 'making '
  has 'torch 2.13.0 (installed by pip)'
  [ "${lines[-1]}" = "$CLONE/.venv/bin/mpiexec" ]
  # on the way back without the MPI's module: nothing is installed
  VARS=()
  in_shell 'source "$1/utils.sh" && ezpz_setup_env' "$NEW"
  has_not 'installing '
  has "MPI: $PWD/mpi/mpiexec"
  VARS=()
  make_wheel . torch 2.0.1
  install_for_user ./torch-2.0.1*.whl
  EXPECT=1 in_shell 'source "$1/utils.sh" && ezpz_setup_env' "$NEW"
  has 'has torch 2.0.1 at '
  has 'EZPZ_SITE_PACKAGES=0'
}

@test "what works is not taken out of the environment where PATH differs, as in a PBS job" {
  local where
  mkdir -p pbs mpi
  make_script pbs/mpiexec 'echo pbs_version = 23.06.06'
  make_script mpi/mpiexec 'echo HYDRA build details:'
  make_script mpi/mpicc 'exit 1'
  for where in "$BIN" "$PWD/pbs:$BIN" "$BIN:$PWD/pbs:$PWD/mpi"; do
    BIN_DIR=$where in_shell 'source "$1/utils.sh" && ezpz_setup_env && command -v mpiexec' "$CLONE"
    has_not 'installing '
    has 'MPI: mpich 5.0.2'
    [ "${lines[-1]}" = "$CLONE/.venv/bin/mpiexec" ]
  done
  # nor where a node's PATH has no Python at all
  make_bin bare
  BIN_DIR=$PWD/bare in_shell 'source "$1/utils.sh" && ezpz_setup_env && command -v mpiexec' "$CLONE"
  has_not 'installing '
}

@test "scripts/test hands on what it says of the shell's variables, and nothing else" {
  local clone=$BATS_TEST_TMPDIR/clone
  mkdir -p "$clone/scripts"
  cp "$REPO/scripts/test" "$clone/scripts"
  printf 'ezpz_setup_env() { env; exit 0; }\n' >"$clone/utils.sh"
  run -0 env PYTHONUNBUFFERED=1 PYTHONPATH=/x OMP_NUM_THREADS=3 EZPZ_RANK=1 'ODD.NAME=1' PIP_FIND_LINKS='/a b' \
    https_proxy=p EZPZ_TEST_FULL=1 LC_ALL=C "$clone/scripts/test" topo
  for kept in 'PIP_FIND_LINKS=/a b' https_proxy=p EZPZ_TEST_FULL=1 LC_ALL=C "HOME=$HOME" "PATH=$PATH"; do
    has "$kept"
  done
  for dropped in PYTHON OMP_NUM EZPZ_RANK ODD BATS; do has_not "$dropped"; done
  run -2 "$clone/scripts/test" nothing
}

# --- the real thing

@test "the real packages: what bash has made, zsh takes over (EZPZ_TEST_FULL=1)" {
  [ "${EZPZ_TEST_FULL-}" = 1 ] || skip 'installs the real torch: set EZPZ_TEST_FULL=1'
  need_zsh
  make_clone "$NEW"
  # Compiled by whoever imports it first: pip would compile all of torch, for half of the time here.
  # And mpi4py, which is built where there is an mpicc, without the minute of -O3.
  local pip=(PIP_NO_COMPILE=0 CFLAGS=-O0) shell # 0, as pip would have it
  mapfile -t -O 2 pip < <(env | grep '^PIP_' | grep -v '^PIP_NO_COMPILE=')
  # What all ranks import is compiled once, by the first that asks for it.
  local train='python -c "import ezpz.examples.minimal, ezpz_obs, torch._dynamo"
      ezpz-launch python -m ezpz.examples.minimal --outdir=out
      grep accuracy out/metrics.jsonl | tail -n 1'
  for shell in "${EZPZ_TEST_BASH:-bash}" zsh; do
    run -0 env -i HOME="$HOME_DIR" PATH="$PATH" "${pip[@]}" "$shell" -c 'set -eu; cd "$1"
      source utils.sh && ezpz_setup_env
      eval "$2"; SECONDS=0; ezpz_setup_env; echo "second call: $SECONDS s"' "$shell" "$NEW" "$train" </dev/null
    echo "$output" >&3
    [[ ${lines[-1]} =~ ^second\ call:\ [12]?[0-9]\ s$ ]] # 2 on an idle machine
    if [ "$shell" = zsh ]; then
      has_not 'installing the packages'
    else
      has 'ranks=2'
      [[ $output =~ \"accuracy\":(0\.9[5-9]|1\.0) ]]
    fi
    train='python -c "import torch, ezpz"'
  done
}
