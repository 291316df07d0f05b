#!/usr/bin/env bats
# What a first call meets on other people's machines: no Python, no venv, nothing that may be written, no
# network, the half of an interrupted call. Each: a clear message, an exit status, nothing half-done, a next
# call that repairs; and the person's shell goes on.

bats_require_minimum_version 1.5.0
load test_helper
load site_helper

setup_file() {
  PYTHON=$(base_python)
  export PYTHON
  export BIN=$BATS_FILE_TMPDIR/bin BARE=$BATS_FILE_TMPDIR/bare UV=$BATS_FILE_TMPDIR/uv CLONE="$BATS_FILE_TMPDIR/it's a clone"
  make_site_bin "$BIN" "$PYTHON"
  make_site_bin "$BARE"
  make_uv "$UV" "$PYTHON"
  make_clone "$CLONE"
}

setup() { fresh_home PIP_CONFIG_FILE=/dev/null PIP_RETRIES=0; }

# The shell after a call that failed: alive, as it was, nothing on stdout, nothing activated or exported.
# shellcheck disable=SC2016
SURVIVES='
  . "$1/utils.sh"; kept >kept.before; env | sort | grep -v ^_= >before; s=0
  ezpz_setup_env >stdout || s=$?
  kept >kept.after; env | sort | grep -v ^_= | diff before -; cmp kept.before kept.after; [ ! -s stdout ]
  [ "$s" != 0 ] && echo "alive $s"'

survives() { # WORDS...
  local options word
  for options in '' 'set -euo pipefail'; do
    here "$KEPT $options
      $SURVIVES" "$CLONE"
    [[ ${lines[-1]} =~ ^alive\ [12]$ ]]
    has 'ezpz: error'
    for word; do has "$word"; done
  done
}

no_python() {
  VARS+=(EZPZ_VENV="$PWD/env")
  BIN_DIR=$BARE survives 'no usable Python' EZPZ_PYTHON
  [ ! -e env ]
}
@test "bash: no Python" { no_python; }
@test "zsh: no Python" { in_zsh no_python; }

@test "no Python: what needs none still answers" {
  VARS=(PBS_JOBID=1.pbs-0001 PBS_O_HOST=polaris-login-02)
  BIN_DIR=$BARE here 'set -euo pipefail; . "$1/utils.sh"; ezpz_get_machine_name; ezpz_set_proxy; ezpz_help >/dev/null
    echo "$http_proxy"; ezpz_reset' "$CLONE"
  [ "$output" = $'polaris\nhttp://proxy.alcf.anl.gov:3128' ]
}

@test "no venv: the module's name and the remedy" {
  mkdir broken && echo 'import sys; sys.modules["venv"] = None' >broken/sitecustomize.py
  VARS+=(PYTHONPATH="$PWD/broken" EZPZ_VENV="$PWD/env")
  survives 'no module venv' python3-venv
  [ ! -e env ]
}

# --- nothing may be written

@test "neither the clone nor HOME can be written: an error with the path and the remedy, nothing left" {
  local machine
  READ_ONLY=("$CLONE" "$HOME_DIR")
  for machine in polaris workstation; do
    VARS=(EZPZ_MACHINE="$machine" EZPZ_MODULES='')
    BIN_DIR=$UV:$BIN survives 'cannot write' EZPZ_VENV "$HOME_DIR"
  done
  [ ! -e "$CLONE/.venv" ]
  [ -z "$(ls -A "$HOME_DIR")" ]
}

@test "the clone cannot be written: the environment goes below XDG_DATA_HOME, else HOME" {
  READ_ONLY=("$CLONE")
  VARS+=(EZPZ_MACHINE=polaris EZPZ_MODULES='')
  BIN_DIR=$UV:$BIN here 'set -eu; . "$1/utils.sh"; ezpz_setup_env 2>/dev/null; echo "$VIRTUAL_ENV"' "$CLONE"
  [[ ${lines[-1]} == "$HOME_DIR/.local/share/ezpz/"*polaris-py* ]]
  VARS+=(XDG_DATA_HOME="$PWD/data")
  BIN_DIR=$UV:$BIN here 'set -eu; . "$1/utils.sh"; ezpz_setup_env 2>/dev/null; echo "$VIRTUAL_ENV"' "$CLONE"
  [[ ${lines[-1]} == "$PWD/data/ezpz/"*polaris-py* ]]
  [ ! -e "$CLONE/.venv" ]
}

@test "HOME cannot be written: what save_env writes goes to TMPDIR, and is found there" {
  READ_ONLY=("$HOME_DIR")
  VARS+=(PBS_JOBID=1.pbs-0001)
  here 'set -eu; . "$1/utils.sh"; ezpz_save_env' "$CLONE"
  [[ $output == "$BATS_TEST_TMPDIR"/* ]]
  [ "$(stat -c '%a' "$output") $(stat -c '%a' "$(dirname "$output")")" = '600 700' ]
  here 'set -eu; unset PBS_JOBID; . "$1/utils.sh"; ezpz_load_env 2>/dev/null; echo "$PBS_JOBID"' "$CLONE"
  [ "$output" = 1.pbs-0001 ]
}

@test "no HOME at all" {
  run env -i PATH="$BARE" bash --norc -c 'set -eu; . "$1/utils.sh"; ezpz_get_machine_name; ezpz_set_proxy; ezpz_reset' bash "$CLONE"
  echo "$output"
  [ "$status" = 0 ]
}

# --- no network

@test "no network: pip's own words, the log, the remedy, no stamp; with wheels the next call repairs" {
  unshare --net true 2>/dev/null || cannot 'unshare --net fails'
  mkdir shells
  make_script shells/bash "exec $(type -P unshare) --net $(type -P bash) \"\$@\""
  VARS+=(EZPZ_VENV="$PWD/env")
  SH=$PWD/shells/bash survives 'pip install' EZPZ_WHEELS
  grep -q '"stamp": ""' "env/.ezpz/state.json"
  BIN_DIR=$UV:$BIN here 'set -eu; . "$1/utils.sh"; ezpz_setup_env; command -v python' "$CLONE"
  [ "${lines[-1]}" = "$PWD/env/bin/python" ]
}

@test "EZPZ_WHEELS that is no folder: an error that names it" {
  VARS+=(EZPZ_VENV="$PWD/env" EZPZ_WHEELS="$PWD/none")
  survives "$PWD/none" EZPZ_WHEELS
}

# --- half-built

# Ended while it makes the environment: utils.bats.
@test "killed while it installs: the next call repairs" {
  make_clone clone
  CLONE=$PWD/clone
  mkdir slow
  make_script slow/uv "case \$1 in pip) kill -KILL \$PPID; exit 1 ;; esac; exec '$UV/uv' \"\$@\""
  # shellcheck disable=SC2016
  run env -i HOME="$HOME_DIR" PATH="$PWD/slow:$BIN" bash --norc -c '. "$1/utils.sh" && ezpz_setup_env && echo ready' bash "$CLONE"
  has_not ready
  grep -q '"stamp": ""' "clone/.venv/.ezpz/state.json"
  BIN_DIR=$UV:$BIN here '. "$1/utils.sh" && ezpz_setup_env && command -v python' "$CLONE"
  [ "${lines[-1]}" = "$CLONE/.venv/bin/python" ]
}

@test "a step that fails stops the call: no environment, no proxy" {
  need_lmod
  VARS+=(SITES="$PWD" EZPZ_MACHINE=aurora MODULEPATH="$PWD/none" PBS_JOBID=1.aurora-pbs PBS_NODEFILE="$PWD/nodes")
  echo x1 >nodes
  # shellcheck disable=SC2153
  EXPECT=1 here "$WITH_LMOD"'
    . "$1/utils.sh"; ezpz_setup_env; s=$?; echo "${VIRTUAL_ENV-none} ${http_proxy-none}"; exit $s' "$CLONE"
  has frameworks
  [ "${lines[-1]}" = 'none none' ]
}

# --- every function, in a shell that stops at everything

every_function() {
  here "$KEPT"'
    set -euo pipefail; . "$1/utils.sh"; kept >kept.before
    ezpz_help | grep -o "^ezpz_[a-z_, ]*" | tr -d , | tr " " "\n" | grep _ >names
    while read -r f; do
      case $f in ezpz_setup_env | ezpz_setup_python | ezpz_install | ezpz_load_env) "$f" no such file >/dev/null 2>&1 </dev/null || : ;;
      *) "$f" >/dev/null 2>&1 </dev/null || : ;;
      esac
      kept >kept.after; cmp kept.before kept.after; echo "after $f"
    done <names' "$CLONE"
  [ "$(grep -c '^after ezpz_' <<<"$output")" -ge 15 ]
}
@test "bash: every function leaves options, traps, IFS and directory alone" { VARS+=(EZPZ_VENV="$PWD/env") && BIN_DIR=$BARE every_function; }
@test "zsh: every function leaves options, traps, IFS and directory alone" { need_zsh && VARS+=(EZPZ_VENV="$PWD/env") && BIN_DIR=$BARE SH=zsh every_function; }

@test "messages: stderr only; EZPZ_LOG_LEVEL and NO_COLOR" {
  need_hostname
  VARS+=(EZPZ_MACHINE=none)
  EXPECT=1 here '. "$1/utils.sh"; ezpz_get_machine_name 2>/dev/null' "$CLONE"
  [[ $output != *ezpz:* ]]
  VARS=(NO_COLOR=1 EZPZ_VENV="$PWD/env" EZPZ_LOG_LEVEL=WARNING)
  BIN_DIR=$UV:$BIN here '. "$1/utils.sh"; ezpz_setup_env' "$CLONE"
  [ -z "$output" ]
  VARS=(NO_COLOR=1 EZPZ_VENV="$PWD/env")
  BIN_DIR=$UV:$BIN here '. "$1/utils.sh"; ezpz_setup_env' "$CLONE"
  has_not $'\e['
}

# --- from a pipe

@test "source <(cat utils.sh): the clone is EZPZ_ROOT or the directory; EZPZ_ROOT that is none is an error, 2" {
  local shell piped
  for shell in bash zsh; do
    command -v "$shell" >/dev/null || continue
    piped='source <(cat "$1/utils.sh")'
    # Before 4.0 bash reads nothing there, and says 0.
    [[ $shell != bash || ! "$("$BIN/bash" --version)" =~ version\ 3 ]] || piped='source /dev/stdin <<<"$(cat "$1/utils.sh")"'
    VARS=(EZPZ_VENV="$PWD/env" EZPZ_ROOT="$PWD")
    SH=$shell EXPECT=2 here 'set -u; '"$piped"'; ezpz_setup_env' "$CLONE"
    has EZPZ_ROOT
    VARS=(EZPZ_VENV="$PWD/env")
    SH=$shell BIN_DIR=$UV:$BIN here 'set -eu; '"$piped"'; export EZPZ_ROOT=$1; ezpz_setup_env; echo "$VIRTUAL_ENV"' "$CLONE"
    [ "${lines[-1]}" = "$PWD/env" ]
    SH=$shell BIN_DIR=$UV:$BIN here 'set -eu; cd "$1"; '"$piped"'; ezpz_setup_env; echo "$VIRTUAL_ENV"' "$CLONE"
    [ "${lines[-1]}" = "$PWD/env" ]
  done
}
