# shellcheck shell=bash
# utils.sh: from a fresh clone to a working environment, in the shell you are in.
#   source utils.sh && ezpz_setup_env && ezpz-launch python -m ezpz.examples.minimal
# For bash >= 3.2 and zsh; needs Python >= 3.11. Sourcing it only defines functions: ezpz_* for you
# (ezpz_help lists them), _ezpz_* for itself. Messages go to stderr. Settings, all optional:
#   EZPZ_PYTHON           the Python to build the environment with (default: look for one)
#   EZPZ_VENV             where the environment is (default: .venv in the clone)
#   EZPZ_SITE_PACKAGES=0  do not re-use the torch, mpi4py and numpy of that Python
#   EZPZ_LOG_LEVEL        WARNING: only warnings and errors
#   PIP_*                 pip's own; they are respected

# ezpz_setup_env: make (or find) the environment of this clone and activate it.
#   usage: ezpz_setup_env
#   An active virtual environment is used as it is; else $EZPZ_VENV; else .venv in the clone. A torch
#   that the Python already has is kept, and so is an mpiexec on PATH. Call it again to repair.
#   exports: what bin/activate does (VIRTUAL_ENV, PATH)
#   exit codes: 0 active, 1 a step failed, 2 utils.sh is not in a whole clone
ezpz_setup_env() {
  local venv
  # The work is done in a subshell: your options, variables and traps stay yours.
  venv=$(_ezpz_prepare) || return $?
  _ezpz_activate "$venv"
}

# ezpz_help: list these functions.
#   usage: ezpz_help
#   exports: nothing
#   exit codes: 0
ezpz_help() {
  command awk '/^#/ { text = text "\n" substr($0, 3); next }
    /^ezpz_[a-z_]*\(\)/ { print substr(text, 2) "\n" }
    { text = "" }' "$(_ezpz_self)"
}

_ezpz_error() { printf 'ezpz: error: %s\n' "$*" >&2 && return 1; }
_ezpz_say() {
  case ${EZPZ_LOG_LEVEL-} in [WwEeCc]*) ;; *) printf 'ezpz: %s\n' "$*" >&2 ;; esac
}

# Runs in the subshell of a command substitution; prints the environment's path. The functions
# that it calls read and set the local variables declared here.
_ezpz_prepare() {
  [ -z "${ZSH_VERSION-}" ] || emulate sh
  set +euC -f # -f: unquoted lists are split, never globbed
  set +o pipefail
  trap - ERR DEBUG
  exec 3>&1 >&2 # whatever a child prints is a message, not our answer
  local IFS=$' \t\n' root venv state active='' python='' version='' pins='' looked=''
  local packages='topo device tp dist launch obs suite' kind='' had_version='' had_pins='' had_venv='' mpiexec mpi key stamp='' start
  start=$(command date +%s)
  root=$(command dirname -- "$(_ezpz_self)")
  { [ -f "$root/constraints.txt" ] && [ -f "$root/packages/ezpz-suite/pyproject.toml" ]; } ||
    _ezpz_error "no packages/ and constraints.txt beside utils.sh in $root: source the utils.sh of a whole clone" || return 2
  [ -z "${EZPZ_PYTHON-}" ] || _ezpz_find_python || return 1
  _ezpz_choose_venv || return 1
  if [ -z "$active" ] && { [ "$kind" = made ] || _ezpz_is_free "$venv"; }; then
    { [ -n "$python" ] || _ezpz_find_python; } && { _ezpz_still_fits || _ezpz_make_venv; }
  else
    _ezpz_adopt
  fi || return 1
  # An mpiexec of a module or the system is the machine's MPI. The site's mpi4py has one too, if only srun
  # starts it: a second MPI beside it would start N worlds of one.
  mpi=path mpiexec=$(_ezpz_which mpiexec) || case "$kind $pins" in
    made*' mpi4py=='*) mpi=site mpiexec='the one of mpi4py' ;;
    *) mpi=wheel ;;
  esac
  key=$(_ezpz_key)
  [ ! -f "$state/stamp" ] || IFS= read -r stamp <"$state/stamp"
  [ "$stamp" = "$key" ] || _ezpz_install || return 1
  _ezpz_say "$(command cat "$state/summary")"
  _ezpz_say "environment: $venv ($(($(command date +%s) - start)) s)"
  printf '%s\n' "$venv" >&3
}

# Which environment, whether it is the active one, and what an earlier call noted.
_ezpz_choose_venv() {
  venv=${EZPZ_VENV:-$root/.venv}
  case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
  if _ezpz_runs "${VIRTUAL_ENV-}/bin/python"; then
    [ -z "${EZPZ_VENV-}" ] || [ "$VIRTUAL_ENV" -ef "$venv" ] ||
      printf 'ezpz: warning: EZPZ_VENV=%s is not used while %s is active\n' "$EZPZ_VENV" "$VIRTUAL_ENV"
    venv=$VIRTUAL_ENV active=1
  elif [ "${VIRTUAL_ENV:-$venv}" != "$venv" ]; then # our own broken one is repaired
    _ezpz_error "the active VIRTUAL_ENV=$VIRTUAL_ENV has no bin/python that runs: deactivate, or unset VIRTUAL_ENV" || return 1
  fi
  state=$venv/.ezpz
  [ ! -f "$state/base" ] || IFS='|' read -r kind had_version had_pins had_venv <"$state/base"
}
_ezpz_runs() { [ -n "${1%/bin/python}" ] && [ -x "$1" ] && command "$1" -ISc '' 2>/dev/null; }
# Nothing there, or an empty directory: ours to fill.
_ezpz_is_free() { ! command ls -A "$1" 2>/dev/null | command grep -qvx .ezpz && { [ -d "$1" ] || [ ! -e "$1" ]; }; }

# An environment that is active, or that someone else made: used as it is, never emptied.
_ezpz_adopt() {
  pins=$had_pins # noted before our first install: what was there by itself
  _ezpz_runs "$venv/bin/python" ||
    _ezpz_error "$venv was not made here, and its bin/python does not run: remove it, or set EZPZ_VENV" || return 1
  [ -z "$kind" ] || return 0
  _ezpz_try "$venv/bin/python" pip || _ezpz_error "$venv/bin/python $looked" || return 1
  _ezpz_note adopted
}

# Where on PATH, the environment's own bin left out: what the machine itself brings.
_ezpz_which() {
  local IFS=: dir
  for dir in $PATH; do
    [ "$dir" -ef "${venv:-/nowhere}/bin" ] && continue
    [ -f "$dir/$1" ] && [ -x "$dir/$1" ] && printf '%s\n' "$dir/$1" && return 0
  done
  return 1
}

# Sets python, version and pins, or says what was looked at and why it will not do.
_ezpz_find_python() {
  local name found base tried=''
  set -- python3 python3.14 python3.13 python3.12 python3.11 python
  [ -z "${CONDA_PREFIX-}" ] || set -- "$CONDA_PREFIX/bin/python" "$@"
  [ -z "${EZPZ_PYTHON-}" ] || set -- "$EZPZ_PYTHON"
  for name; do
    case $name in */*) found=$name ;; *) found=$(_ezpz_which "$name") || continue ;; esac
    # A virtual environment that is not active is on PATH: ours would not see its packages.
    base=$(command "$found" -Ic 'import sys; sys.prefix == sys.base_prefix or print(sys._base_executable)' 2>/dev/null)
    [ ! -x "${base:-/nowhere}" ] || found=$base
    _ezpz_try "$found" 'venv ensurepip' && break
    tried="$tried; $found $looked"
    case $looked in *EZPZ_SITE_PACKAGES*) break ;; esac # another Python would pass over the site's torch
  done
  # numpy alone is not worth opening the environment to all of the site's packages
  case $pins in torch* | mpi4py*) ;; *) pins='' ;; esac
  [ -n "$python" ] || _ezpz_error "no usable Python >= 3.11 with venv. Looked for: $*. Found: ${tried:-; nothing}." \
    "Remedy: load a module that brings one, install one, or set EZPZ_PYTHON=/path/to/python3"
}

# Asks the Python $1, which must have the modules $2. If it will do: sets python, version and
# pins; else `looked` says why not. torch is found, not imported. Old Pythons must parse this.
_ezpz_try() {
  local answer
  answer=$(command "$1" -c '
import sys
sys.path = [p for p in sys.path if p]  # not the working directory
root, modules, reuse = sys.argv[1:]
def end(state, pins=()):
    print("%d.%d.%d|%s|%s" % (sys.version_info[:3] + (state, " ".join(pins))))
    sys.exit()
if sys.version_info < (3, 11):
    end("is too old")
import glob, re, importlib.metadata as md
from importlib.util import find_spec
for name in modules.split():
    find_spec(name) or end("has no module %s (remedy: apt install python3-venv, or python -m ensurepip)" % name)
def numbers(v):
    return [int(n) for n in re.match("[0-9.]*", v)[0].split(".") if n]
wanted = "".join(open(f, encoding="utf-8").read() for f in glob.glob(glob.escape(root) + "/packages/*/pyproject.toml"))
pins = []
for name in ("torch", "mpi4py", "numpy") if reuse != "0" else ():
    spec = find_spec(name)
    if spec and spec.origin:
        found = next((d.version for d in md.distributions(name=name)), "")
        least = max(re.findall("\"%s>=([0-9.]+)" % name, wanted), key=numbers, default="0")
        if found and numbers(found) >= numbers(least):
            pins.append(name + "==" + found)
        elif name == "torch":
            end("has torch %s at %s, but %s or newer is needed: choose another Python, or set "
                "EZPZ_SITE_PACKAGES=0 to install one" % (found or "(no version recorded)", spec.origin, least))
end("ok", pins)' "$root" "$2" "${EZPZ_SITE_PACKAGES-}" 2>/dev/null)
  case $answer in
    *'|ok|'*) python=$1 version=${answer%%|*} pins=${answer##*|} && return 0 ;;
    '') looked='does not run' ;;
    *) looked="(${answer%%|*}) ${answer#*|}" looked=${looked%|} ;;
  esac
  return 1
}

# Is the environment that an earlier call made still the right one? Another minor version
# of Python alone is no reason to rebuild it, unless torch comes from that Python.
_ezpz_still_fits() {
  [ "$kind" = made ] && [ "$had_venv" = "$venv" ] && [ "$had_pins" = "$pins" ] && _ezpz_runs "$venv/bin/python" &&
    { [ "${had_version%.*}" = "${version%.*}" ] || [ -z "$pins${EZPZ_PYTHON-}" ]; }
}

# `base` is written first: it marks a half-made environment as ours to repair.
_ezpz_note() {
  kind=$1
  { command mkdir -p "$state" && printf '%s|%s|%s|%s\n' "$kind" "$version" "$pins" "$venv" >"$state/base"; } 2>/dev/null ||
    _ezpz_error "cannot write to $venv: set EZPZ_VENV to a path that you may write to"
}

_ezpz_make_venv() {
  _ezpz_say "making $venv with Python $version, $python${pins:+; keeping its $pins}"
  _ezpz_note made || return 1
  command rm -f "$state/stamp" && command find "$venv" -mindepth 1 -maxdepth 1 ! -name .ezpz -exec rm -rf {} +
  command "$python" -P -m venv ${pins:+--system-site-packages} "$venv" >"$state/pip.log" 2>&1 || _ezpz_failed "$python -m venv"
}

# Checksum of all that determines what gets installed.
_ezpz_key() {
  local package
  {
    printf '%s\n' 1 "$root" "$venv" "$pins" "$mpi"
    command "$venv/bin/python" -ISc 'import sys; print(sys.version)'
    for package in $packages; do command cat "$root/packages/ezpz-$package/pyproject.toml"; done
    command cat "$root/constraints.txt"
  } | command cksum
}

_ezpz_install() {
  local pin package
  command rm -f "$state/stamp"
  if ! command "$venv/bin/python" -P -m pip --version >/dev/null 2>&1; then
    [ "$kind" = made ] || _ezpz_error "no working pip: run $venv/bin/python -m ensurepip" || return 1
    { { [ -n "$python" ] || _ezpz_find_python; } && _ezpz_make_venv; } || return 1
  fi
  # pip writes INSTALLER near the end; without it pip would take an interrupted install for complete.
  [ "$kind" != made ] || command find "$venv/lib" -name '*.dist-info' -prune ! -exec test -e '{}/INSTALLER' \; -exec rm -rf {} +
  set -- # the constraints, with the kept versions in place of ours
  for pin in $pins; do set -- "$@" -e "/^${pin%%==*}==/d"; done
  { command sed -e '' "$@" "$root/constraints.txt" && printf '%s\n' "$pins" | command tr ' ' '\n'; } \
    >"$state/constraints.txt" && : >"$state/pip.log" || return 1
  if [ "$kind" = made ] && [ "$mpi" != wheel ]; then # an earlier call's wheel would hide the machine's mpiexec
    command "$venv/bin/python" -P -m pip uninstall -y mpich >>"$state/pip.log" 2>&1
  fi
  _ezpz_say "installing the build backend (log: $state/pip.log)"
  _ezpz_pip hatchling editables || return 1
  set -- --no-build-isolation # seven editable builds in 2 s instead of 15 s
  for package in ${packages% suite}; do set -- "$@" -e "$root/packages/ezpz-$package"; done
  set -- "$@" -e "$root/packages/ezpz-suite[examples]"
  [ "$mpi" != wheel ] || set -- "$@" mpich
  _ezpz_say "installing the packages and what they need; the first time, that takes a minute or more"
  _ezpz_pip "$@" || return 1
  # Editable sources are compiled by whoever imports them first: not by every rank of a job, and
  # not where PYTHONDONTWRITEBYTECODE is set. A clone that cannot be written works as well.
  command "$venv/bin/python" -P -m compileall -q -x '/(tests|benchmarks)/' "$root/packages" >>"$state/pip.log" 2>&1
  _ezpz_summary >"$state/summary" && printf '%s\n' "$key" >"$state/stamp.new" &&
    command mv -f "$state/stamp.new" "$state/stamp"
}

# On a terminal pip shows its own progress; elsewhere its output is only logged. -P: the working directory
# is not searched for modules. --no-user: a site's PIP_USER=1 would install outside the environment.
_ezpz_pip() {
  set -- install --no-user --disable-pip-version-check -c "$state/constraints.txt" "$@"
  if [ -t 2 ]; then
    command "$venv/bin/python" -P -m pip --log "$state/pip.log" "$@"
  else
    command "$venv/bin/python" -P -m pip "$@" >>"$state/pip.log" 2>&1
  fi || _ezpz_failed "pip install${pins:+ (keeping $pins)}"
}
_ezpz_failed() {
  command tail -n 15 "$state/pip.log" >&2
  _ezpz_error "$1 failed: see above and $state/pip.log. Correct that and call ezpz_setup_env again: it repairs what is half done"
}

_ezpz_summary() {
  command "$venv/bin/python" -Pc '
import sys, importlib.metadata as md
pins, mpi = sys.argv[1:]
def at(name):
    dist = next(iter(md.distributions(name=name)), None)
    how = "kept, from %s" % dist.locate_file("") if dist and name + "==" in pins else "installed by pip"
    return "%s %s (%s)" % (name, dist.version, how) if dist else "no " + name
print("Python %d.%d.%d" % sys.version_info[:3], at("torch"), "MPI: " + (mpi or at("mpich")), sep=", ")
' "$pins" "$mpiexec"
}

# In your shell: activate, unless it is active; then only see that its bin is first on PATH.
_ezpz_activate() {
  local rest=":$PATH:"
  if [ "${VIRTUAL_ENV-}" -ef "$1" ]; then
    case $rest in *":$VIRTUAL_ENV/bin:"*) rest=${rest%%":$VIRTUAL_ENV/bin:"*}:${rest#*":$VIRTUAL_ENV/bin:"} ;; esac
    rest=${rest%:}
    export PATH="$VIRTUAL_ENV/bin:${rest#:}"
    return 0
  fi
  # shellcheck disable=SC1091 # made by python -m venv, not there when checking
  . "$1/bin/activate" && [ "${VIRTUAL_ENV-}" -ef "$1" ] && return 0
  _ezpz_error "$1/bin/activate activated ${VIRTUAL_ENV:-nothing}: remove $1 and call ezpz_setup_env again"
}

# Defines _ezpz_self, which prints the absolute path of this file: only now can it be asked.
_ezpz_locate() {
  local file link
  if [ -n "${ZSH_VERSION-}" ]; then
    # shellcheck disable=SC2016 # for zsh to expand; bash could not parse it
    eval 'file=${${(%):-%x}:A}'
  else
    file=${BASH_SOURCE[0]}
    while [ -L "$file" ]; do
      link=$(command readlink "$file") || return 1
      case $link in /*) file=$link ;; *) file=$(command dirname -- "$file")/$link ;; esac
    done
    file=$(CDPATH='' builtin cd -P -- "$(command dirname -- "$file")" >/dev/null && builtin pwd -P)/${file##*/}
  fi
  eval "_ezpz_self() { printf '%s\\n' $(printf '%q' "$file"); }"
}

# Executed, or sourced from another shell, it could not do its work.
case ${BASH_VERSION:+bash}${ZSH_VERSION:+zsh:${ZSH_EVAL_CONTEXT-}} in
  bash) [ "${BASH_SOURCE[0]}" != "$0" ] ;;
  zsh*:file*) ;;
  *) false ;;
esac || {
  printf '%s\n' 'utils.sh: do not execute it; in bash or zsh: source utils.sh' >&2
  # shellcheck disable=SC2317 # return fails where the file is executed
  return 2 2>/dev/null || exit 2
}
_ezpz_locate
