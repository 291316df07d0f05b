# shellcheck shell=bash
# utils.sh: make a login or compute node, a workstation or a Mac ready, in the shell you are in.
#   source utils.sh && ezpz_setup_env && ezpz-launch python -m ezpz.examples.minimal
# For bash >= 3.2 and zsh. Sourcing it only defines functions: ezpz_* for you, _ezpz_* for itself.
ezpz_help() {
  command cat <<'HELP'
Each returns 0; or 1, with the reason and the remedy on stderr; or 2, where EZPZ_ROOT is no clone.
ezpz_setup_env: modules, proxy, Python, job; again to repair
ezpz_load_modules: load the machine's modules, and its conda environment if none is active
ezpz_set_proxy [URL]: export http_proxy and the others where not set; in a job the machine's
ezpz_setup_python: make or find the environment, install all packages, activate it. An active one
    is used as it is; else $EZPZ_VENV; else .venv in the clone, on a known machine .venv/MACHINE-pyN
    (~/.local/share/ezpz without a writable clone). The site's torch, mpi4py and MPI are kept
ezpz_install [ezpz-tp...]: the same for some packages and what they need
ezpz_setup_job: export EZPZ_JOB (id or none), EZPZ_SCHEDULER (pbs, slurm, none), EZPZ_NODES,
    EZPZ_GPUS_PER_NODE, in a job EZPZ_HOSTFILE; not what is set already, but for another EZPZ_JOB
ezpz_get_machine_name: print polaris, frontier, ..., generic-pbs, generic-slurm or workstation
ezpz_get_scheduler_type, ezpz_get_job_id, ezpz_get_num_nodes, ezpz_get_gpus_per_node: print it;
    these, ezpz_setup_job and ezpz_write_hostfile ask ezpz-topo, which is in the environment
ezpz_write_hostfile [FILE]: write the job's hosts, or localhost, one a line; print the path
ezpz_save_env [FILE]: write the variables of job, modules and environment; print the path. Without
    FILE one in ~/.ezpz, which only the job's first node replaces
ezpz_load_env [FILE]: export what ezpz_save_env wrote (default: the newest), in another shell
ezpz_reset, ezpz_help: undo what the functions above did in this shell; print this
Settings, all optional:
    EZPZ_MACHINE          the machine, where it is not recognized
    EZPZ_MODULES          modules to load instead of the machine's, separated by spaces, or empty
    EZPZ_PYTHON           the Python to make the environment with
    EZPZ_VENV             where the environment is
    EZPZ_SITE_PACKAGES=0  do not reuse that Python's torch, mpi4py and numpy
    EZPZ_INDEX            the package index to install from, instead of pip's
    EZPZ_WHEELS           a folder of wheels to install from, instead of an index
    EZPZ_ROOT             the clone, if this comes from a pipe (without: the released packages)
    EZPZ_LOG_LEVEL        WARNING: only warnings and errors
    PIP_*, UV_*, MPICC    as pip, uv and mpi4py read them; MPICC= takes mpi4py's wheel
HELP
}
ezpz_setup_env() {
  { ezpz_load_modules && ezpz_set_proxy "" && _ezpz_python && ezpz_setup_job; } || return
  _ezpz_say "$(ezpz_get_machine_name), scheduler $EZPZ_SCHEDULER, job $EZPZ_JOB," \
    "$EZPZ_NODES nodes x $EZPZ_GPUS_PER_NODE devices"
  _ezpz_report
}
# --- which machine; the table is made of ezpz_topo/machines/*.toml by scripts/lib/machines.py
_ezpz_machines() {
  command cat <<MACHINES
aurora pbs domain=aurora.alcf.anl.gov host=aurora-uan-# load=frameworks \
  proxy=http://proxy.alcf.anl.gov:3128
crux pbs domain=crux.alcf.anl.gov host=crux-login-# host=crux-uan-# \
  proxy=http://proxy.alcf.anl.gov:3128
frontier slurm domain=frontier.olcf.ornl.gov host=frontier# LMOD_SYSTEM_NAME=frontier \
  SLURM_CLUSTER_NAME=frontier load=rocm proxy=http://proxy.ccs.ornl.gov:3128
perlmutter slurm domain=perlmutter.nersc.gov NERSC_HOST=perlmutter SLURM_CLUSTER_NAME=perlmutter \
  load=pytorch
polaris pbs domain=polaris.alcf.anl.gov host=polaris-login-# use=/soft/modulefiles load=conda \
  conda=base proxy=http://proxy.alcf.anl.gov:3128
sirius pbs domain=sirius.alcf.anl.gov host=sirius-uan-# use=/soft/modulefiles load=conda \
  conda=base proxy=http://proxy.alcf.anl.gov:3128
sophia pbs domain=sophia.alcf.anl.gov host=sophia-login-# host=sophia-gpu-# host=sophia-pbs-# \
  use=/soft/modulefiles load=conda conda=base proxy=http://proxy.alcf.anl.gov:3128
sunspot pbs domain=sunspot.alcf.anl.gov load=frameworks proxy=http://proxy.alcf.anl.gov:3128
MACHINES
}
_ezpz_of() { _ezpz_machines | command sed -n "s/^$1 .* $2=\([^ ]*\).*/\1/p" | command tr , ' '; }
ezpz_get_machine_name() ( # as ezpz_topo does, without the match rules of your own machine files
  _ezpz_plain
  job=${SLURM_JOB_ID:+slurm}${PBS_JOBID:+pbs} name=${EZPZ_MACHINE-}
  [ "$job" != slurmpbs ] || _ezpz_error "SLURM_JOB_ID and PBS_JOBID are set: unset one" || return
  if [ -z "$name" ]; then
    name=$(_ezpz_machines | _ezpz_match "$(command uname -n)" "$job")
    case $name in *' or '*) _ezpz_say "warning: this is $name: set EZPZ_MACHINE" && name='' ;; esac
    case ${name:-$job} in slurm | pbs) name=generic-$job ;; esac
    printf '%s\n' "${name:-workstation}" && return
  fi
  known="$(_ezpz_machines | command sed 's/ .*//' | command tr '\n' ' ')generic-pbs generic-slurm"
  name=$(printf %s "$name" | command tr '[:upper:]' '[:lower:]') known=" $known workstation " IFS=:
  for folder in ${EZPZ_MACHINES:-"${XDG_CONFIG_HOME:-${HOME-}/.config}/ezpz/machines"}; do
    [ ! -f "$folder/$name.toml" ] || known="$known$name "
  done
  case $name:$known in *[!a-z0-9_-]*:*) ;; *" $name "*) printf '%s\n' "$name" && return ;; esac
  _ezpz_error "EZPZ_MACHINE=$EZPZ_MACHINE; expected one of$known: or a machine file of your own"
)
# How far a rule is believed: 3 scheduler and kernel, 2 variables a shell inherits, 1 short names.
_ezpz_match() { # HOST JOB
  command awk -v host="$1" -v job="$2" '
    function has(word) { return index(" " $0 " ", " " word " ") }
    function under(name) { # one of the domains
      while (!has("domain=" name)) if (!sub(/^[^.]*[.]/, "", name)) return 0
      return 1
    }
    function called(name) { # host=frontier# is frontier and a number
      sub(/[.].*/, "", name)
      return has("host=" name) || (sub(/[0-9]+$/, "#", name) && has("host=" name))
    }
    function raise(level, holding) { if (holding && holds < level) holds = level }
    {
      holds = against = 0
      for (i = 3; i <= NF; i++) {
        if ($i !~ /^[A-Z]/ || !split($i, rule, "=") || !ENVIRON[rule[1]]) continue
        level = rule[1] job == "SLURM_CLUSTER_NAMEslurm" ? 3 : 2
        same = rule[2] == ENVIRON[rule[1]]
        raise(level, same)
        if (same) level = host ~ /[.]/ && !under(host) ? 2 : 0
        if (against < level) against = level
      }
      server = ENVIRON["PBS_JOBID"] # 123.server
      raise(3, under(host) || sub(/^[^.]*[.]/, "", server) && (under(server) || called(server)))
      raise(2, under(ENVIRON["PBS_O_HOST"]) || called(ENVIRON["PBS_O_HOST"]))
      raise(1, called(host))
      if ((job && job != $2) || holds <= against || holds < best) next
      found = (holds == best ? found " or " : "") $1
      best = holds
    }
    END { print found }'
}
# --- modules and proxy
ezpz_load_modules() { _ezpz_calmly _ezpz_load; }
_ezpz_load() {
  local machine folder wanted name code=0 was=$PATH venv=${VIRTUAL_ENV-} prefix=${CONDA_PREFIX-}
  machine=$(ezpz_get_machine_name) && folder=$(_ezpz_of "$machine" use) || return
  wanted=${EZPZ_MODULES-$(_ezpz_of "$machine" load)}
  [ -n "$wanted" ] || return 0
  { command -v module >/dev/null 2>&1 && [ -n "${MODULEPATH-}" ]; } ||
    _ezpz_error "$machine needs module load $wanted; expected the command and a MODULEPATH:" \
      "start a login shell (bash -l), or EZPZ_MODULES= for none" || return
  case :$MODULEPATH: in *":${folder:-$MODULEPATH}:"*) folder='' ;; esac
  for name in $wanted; do
    ! _ezpz_is_loaded "$name" || continue
    [ -z "$folder" ] || { module use "$folder" >&2 && _ezpz_did module unuse "$folder"; }
    folder=''
    module load "$name" >&2 && _ezpz_is_loaded "$name" && _ezpz_did module unload "$name" ||
      _ezpz_error "module load $name failed on $machine (loaded: ${LOADEDMODULES:-none}): see" \
        "above, and module avail $name; or name others in EZPZ_MODULES" || { code=1 && break; }
  done
  name=$(_ezpz_of "$machine" conda)
  if [ "$code$prefix" = 0 ] && [ -n "$name" ] && _ezpz_is_loaded conda; then
    { conda activate "$name" >&2 && _ezpz_did conda deactivate; } ||
      _ezpz_error "conda activate $name failed: see above, and module show $wanted" || code=1
  fi
  _ezpz_keep CONDA_PREFIX "$prefix" && _ezpz_keep VIRTUAL_ENV "$venv"
  return "$code"
}
_ezpz_is_loaded() { case :${LOADEDMODULES-}: in *":$1:"* | *":$1/"*) ;; *) return 1 ;; esac }
_ezpz_keep() { # VARIABLE FOLDER: what was active stays so, whatever a module put in its place
  case :$was: in *":${2:-/}/bin:"*) export "$1=$2" ;; *) return 0 ;; esac
  case ${was%%:*}:$PATH: in "$2/bin:$2/bin:"*) return ;; "$2/bin:"*) ;; *":$2/bin:"*) return ;; esac
  _ezpz_say "warning: a module took $2/bin, which is active, from its place on PATH: put back"
  _ezpz_first "$2/bin"
}
ezpz_set_proxy() { _ezpz_import _ezpz_proxy_facts "${1-}"; }
_ezpz_proxy_facts() (
  _ezpz_plain
  machine=$(ezpz_get_machine_name) && domain=$(_ezpz_of "$machine" domain) || return
  url=$1 job=${SLURM_JOB_ID-}${PBS_JOBID-} # login nodes have a network
  [ -n "$url" ] || [ -z "$job" ] || url=$(_ezpz_of "$machine" proxy)
  [ -z "${url##*://?*}" ] || _ezpz_error "$url is no proxy; expected http://host:port" || return
  for name in ${url:+http_proxy:HTTP_PROXY https_proxy:HTTPS_PROXY no_proxy:NO_PROXY}; do
    [ "$name" != no_proxy:NO_PROXY ] || url=localhost,127.0.0.1,::1${domain:+,.${domain#*.}}
    eval "value=\${${name%:*}-\${${name#*:}-\$url}}" # one that is set holds for both
    eval "printf '%s\n' \"${name%:*}=\${${name%:*}-\$value}\" \"${name#*:}=\${${name#*:}-\$value}\""
  done
)
# --- Python
ezpz_setup_python() { _ezpz_python && _ezpz_report; }
ezpz_install() { _ezpz_python "$@" && _ezpz_report; }
_ezpz_report() { _ezpz_say "$(command cat "$VIRTUAL_ENV/.ezpz/summary"), in $VIRTUAL_ENV"; }
_ezpz_python() { # [PACKAGE...]: another process makes the environment, which is activated here
  local venv
  venv=$(_ezpz_environment "$@" </dev/null) || return
  [ ! "${VIRTUAL_ENV-}" -ef "$venv" ] || { _ezpz_first "$VIRTUAL_ENV/bin" && return; }
  # shellcheck disable=SC1091 # made by python -m venv, not there when checking
  . "$venv/bin/activate" && [ "${VIRTUAL_ENV-}" -ef "$venv" ] &&
    _ezpz_did _ezpz_leave "$venv" && return
  _ezpz_error "$venv/bin/activate activated ${VIRTUAL_ENV:-nothing}: remove $venv and call again"
}
_ezpz_leave() { [ ! "${VIRTUAL_ENV-}" -ef "$1" ] || deactivate; }
_ezpz_environment() (
  _ezpz_plain
  root=$(_ezpz_clone) && machine=$(ezpz_get_machine_name) || return
  if [ -n "$root" ]; then
    BASH_ENV='' command bash "$root/scripts/lib/environment" "$machine" "$@"
  else
    _ezpz_install_released "${@:-ezpz-suite[examples]}"
  fi
)
_ezpz_install_released() { # PACKAGE...: pip leaves what is there and new enough: the site's torch
  local name python venv=${VIRTUAL_ENV:-$(_ezpz_place)} site=--system-site-packages
  [ "${EZPZ_SITE_PACKAGES-}" != 0 ] || site=''
  local from="released $* from ${EZPZ_WHEELS:-${EZPZ_INDEX:-the index of pip}}"
  [ "$(command cat "$venv/.ezpz/summary" 2>/dev/null)" = "$from" ] && echo "$venv" && return
  _ezpz_say "no clone: installing the $from into $venv"
  python=$venv/bin/python
  for name in "$python" "${EZPZ_PYTHON:-python3}" python3.14 python3.13 python3.12 python3.11; do
    command env "$name" -c 'import venv, ensurepip, tomllib' 2>/dev/null && break # since 3.11
  done || _ezpz_error "no Python >= 3.11 with venv: load a module, or set EZPZ_PYTHON" || return
  [ -x "$python" ] || command env "$name" -m venv ${site:+"$site"} "$venv" >&2 ||
    _ezpz_error "cannot write to $venv: set EZPZ_VENV to a path that you may write to" || return
  [ -n "${EZPZ_WHEELS-}" ] || [ -z "${MPICC-$(command -v mpicc)}" ] ||
    set -- "$@" --no-binary mpi4py --no-cache-dir # built for the machine's MPI
  case $1 in *suite*) command -v mpiexec >/dev/null || set -- "$@" mpich ;; esac
  [ -z "${EZPZ_INDEX-}" ] || set -- "$@" --index-url "$EZPZ_INDEX"
  [ -z "${EZPZ_WHEELS-}" ] || set -- "$@" --no-index --find-links "$EZPZ_WHEELS"
  command env "$python" -m pip install --no-user --disable-pip-version-check "$@" >&2 ||
    _ezpz_error "pip cannot install the $from: see above. Where they are on no public index, set" \
      "EZPZ_INDEX or EZPZ_WHEELS to what has them, or source utils.sh of a clone" || return
  command mkdir -p "$venv/.ezpz" && printf '%s\n' "$from" >"$venv/.ezpz/summary" && echo "$venv"
  command sh -c 'cp "$0"/lib/python3*/site-packages/ezpz_topo/job.sh "$0/.ezpz"' "$venv" 2>&- || :
}
_ezpz_place() { # of an environment without a clone
  echo "${EZPZ_VENV:-${XDG_DATA_HOME:-${HOME-}/.local/share}/ezpz/$(ezpz_get_machine_name)}"
}
# --- the job: the packages know it
ezpz_setup_job() { _ezpz_import _ezpz_job facts; }
ezpz_get_scheduler_type() { _ezpz_job get SCHEDULER; }
ezpz_get_job_id() { _ezpz_job get JOB; }
ezpz_get_num_nodes() { _ezpz_job get NODES; }
ezpz_get_gpus_per_node() { _ezpz_job get GPUS_PER_NODE; }
ezpz_write_hostfile() { _ezpz_job hostfile "${1-}"; }
ezpz_save_env() { _ezpz_job save "${1-}"; }
ezpz_load_env() { _ezpz_import _ezpz_job load "${1-}" && { hash -r 2>/dev/null || :; }; }
_ezpz_job() (
  _ezpz_plain
  root=$(_ezpz_clone) || return
  file=${root:+$root/packages/ezpz-topo/src/ezpz_topo/job.sh}
  file=${file:-${VIRTUAL_ENV:-$(_ezpz_place)}/.ezpz/job.sh}
  [ -f "$file" ] || _ezpz_error "no $file: call ezpz_setup_env or ezpz_setup_python first" || return
  BASH_ENV='' command bash "$file" "$@"
)
# --- what the functions above have in common
ezpz_reset() { _ezpz_calmly _ezpz_undo; }
_ezpz_did() { _ezpz_done="$(printf '%q ' "$@")"$'\n'"${_ezpz_done-}"; } # how to undo it
_ezpz_undo() {
  local line code=0
  while [ -n "${_ezpz_done-}" ]; do # the last thing done comes first
    line=${_ezpz_done%%$'\n'*} _ezpz_done=${_ezpz_done#*$'\n'}
    eval "$line" >&2 || _ezpz_error "cannot undo: $line" || code=1
  done
  unset _ezpz_done
  hash -r 2>/dev/null || :
  return "$code"
}
_ezpz_import() { # FUNCTION...: export the lines NAME=value that it prints; ~n is a line end, ~t a ~
  local text line name value was nl=$'\n' n='~n' t='~t' tilde='~'
  text=$("$@") || return
  while [ -n "$text" ]; do
    line=${text%%"$nl"*} text=${text#"$line"} text=${text#"$nl"}
    name=${line%%=*} value=${line#*=} value=${value//"$n"/$nl} value=${value//"$t"/$tilde}
    eval "was=\${$name-} line=\${$name+set}"
    [ -n "$line" ] || _ezpz_did unset "$name"
    [ "$line$was" = "set$value" ] || [ -z "$line" ] || _ezpz_did export "$name=$was"
    export "$name=$value"
  done
}
_ezpz_error() { printf 'ezpz: error: %s\n' "$*" >&2 && return 1; }
_ezpz_say() {
  case ${EZPZ_LOG_LEVEL:-INFO}:$* in [!WwEeCc]* | *:warning:*) printf 'ezpz: %s\n' "$*" >&2 ;; esac
}
_ezpz_first() { # FOLDER: on PATH
  local rest=":$PATH:"
  rest=${rest/":$1:"/:} && rest=${rest#:} && export PATH="$1:${rest%:}"
}
_ezpz_plain() { # in a subshell: our options, not yours; -f: unquoted lists are split, never globbed
  [ -z "${ZSH_VERSION-}" ] || emulate sh
  set +euC -f && set +o pipefail && trap - ERR DEBUG && IFS=$' \t\n'
  for name in MACHINE VENV PYTHON SITE_PACKAGES INDEX WHEELS LOG_LEVEL JOB SCHEDULER NODES \
    GPUS_PER_NODE HOSTFILE; do
    eval "[ -z \"\${EZPZ_$name-}\" ] || export EZPZ_$name" # for other processes
  done
}
_ezpz_calmly() { # in your shell: what others wrote (modules, conda) bears neither -u nor -e
  local IFS=$' \t\n' nounset=+u code=0
  [ -z "${ZSH_VERSION-}" ] || emulate -L sh # until this function ends
  case $- in *u*) nounset=-u && set +u ;; esac
  "$@" || code=$?
  set "$nounset"
  return "$code"
}
_ezpz_clone() ( # its folder; nothing without one
  for root in "$(_ezpz_here)" "${EZPZ_ROOT:-/}"; do
    { [ -f "$root/constraints.txt" ] && [ -d "$root/packages/ezpz-suite" ]; } || continue
    CDPATH='' builtin cd -P -- "$root" && builtin pwd -P && return
  done
  [ -z "${EZPZ_ROOT-}" ] || _ezpz_error "EZPZ_ROOT=$EZPZ_ROOT is no clone: unset it" || return 2
)
_ezpz_here() { printf '%s\n' "${EZPZ_ROOT:-$PWD}"; } # this file's folder, unless from a pipe
_ezpz_locate() {
  local file=${BASH_SOURCE[0]-}
  # shellcheck disable=SC2016 # for zsh to expand; bash could not parse it
  [ -z "${ZSH_VERSION-}" ] || eval 'file=${${(%):-%x}:A}'
  file=$(command readlink -f "$file" 2>/dev/null || printf '%s\n' "$file")
  [ ! -f "$file" ] || eval "_ezpz_here() { printf '%s\\n' $(printf '%q' "${file%/*}"); }"
}
# Executed, or sourced from another shell, it could not do its work.
case ${BASH_VERSION:+${BASH_SOURCE[0]-$0}}:${ZSH_EVAL_CONTEXT-} in "$0:" | : | :toplevel | :cmdarg)
  printf '%s\n' 'utils.sh: do not execute it; in bash or zsh: source utils.sh' >&2
  # shellcheck disable=SC2317 # return fails where the file is executed
  return 2 2>/dev/null || exit 2
  ;;
esac
_ezpz_locate
