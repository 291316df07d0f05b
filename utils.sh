# shellcheck shell=bash
# utils.sh: a login or compute node, a workstation or a Mac made ready, in the shell you are in.
#   source utils.sh && ezpz_setup_env && ezpz-launch python -m ezpz.examples.minimal
# For bash >= 3.2 and zsh; needs Python >= 3.11. Sourcing it only defines functions: ezpz_* for you (ezpz_help
# lists them), _ezpz_* for itself. Messages go to stderr, answers to stdout. Settings, all optional:
#   EZPZ_MACHINE          the machine, where it cannot be told
#   EZPZ_MODULES          modules to load instead of the machine's, with spaces between; empty: none
#   EZPZ_PYTHON           the Python to build the environment with (default: look for one)
#   EZPZ_VENV             where the environment is (default: as ezpz_setup_python says)
#   EZPZ_SITE_PACKAGES=0  do not re-use the torch, mpi4py and numpy of that Python
#   EZPZ_WHEELS           a folder of wheels to install from, instead of an index
#   EZPZ_ROOT             the clone, if this comes from a pipe: source <(cat utils.sh); bash 3: . /dev/stdin <<<"$(cat utils.sh)"
#   EZPZ_LOG_LEVEL        WARNING: only warnings and errors
#   PIP_*, UV_*, MPICC    as pip, uv and mpi4py read them; MPICC= asks for mpi4py's wheel; unset, an environment keeps its MPI

# ezpz_setup_env: all of it, in this order: job, modules, proxy, Python. Call it again to repair.
#   usage: ezpz_setup_env; exports what these export
#   exit codes: 0 ready, 1 a step failed, 2 there is no whole clone
ezpz_setup_env() {
  local start
  start=$(command date +%s)
  { _ezpz_root >/dev/null && ezpz_setup_job && ezpz_load_modules && ezpz_set_proxy "" && _ezpz_python; } || return $?
  _ezpz_say "$(ezpz_get_machine_name), scheduler $EZPZ_SCHEDULER, job $EZPZ_JOB, $EZPZ_NODES nodes x $EZPZ_GPUS_PER_NODE devices"
  _ezpz_report "$start"
}
# ezpz_setup_job: tell the job's facts. One that is set stays, unless EZPZ_JOB is another job (qsub -V).
#   usage: ezpz_setup_job; exports EZPZ_JOB (its id, or none) EZPZ_SCHEDULER (pbs, slurm, none) EZPZ_NODES
#     EZPZ_GPUS_PER_NODE, and in a job EZPZ_HOSTFILE; ezpz-launch's own EZPZ_* are others
#   exit codes: 0, 1 the job's variables contradict each other, or as ezpz_get_num_nodes
ezpz_setup_job() { _ezpz_import _ezpz_job_facts; }
# ezpz_setup_python: make (or find) the environment of the clone, install the packages, activate it. An active
#   one is used as it is; else $EZPZ_VENV; else .venv in the clone, on a known machine .venv/<machine>-py<minor>
#   (~/.local/share/ezpz where the clone cannot be written). The site's torch, mpi4py and MPI are kept.
#   usage: ezpz_setup_python; exports what bin/activate does (VIRTUAL_ENV, PATH)
#   exit codes: 0 active, 1 a step failed, 2 there is no whole clone
ezpz_setup_python() { ezpz_install "$@"; }
# ezpz_install: install packages of the clone, editable, with what they need, into that environment.
#   usage: ezpz_install [ezpz-tp...] (default: all); exports what ezpz_setup_python does
#   exit codes: as ezpz_setup_python
ezpz_install() {
  local start
  start=$(command date +%s) && _ezpz_python "$@" && _ezpz_report "$start"
}
# ezpz_load_modules: load the machine's modules, or $EZPZ_MODULES, and its conda environment if none is active.
#   usage: ezpz_load_modules; exports what the modules do
#   exit codes: 0 all are loaded, 1 one is not, or there are none to choose from
ezpz_load_modules() { _ezpz_calmly _ezpz_load; }
# ezpz_get_machine_name: print aurora, crux, frontier, perlmutter, polaris, sirius, sophia or sunspot, else
#   generic-pbs, generic-slurm or workstation: as ezpz_topo does, without the match rules of your own files.
#   usage: ezpz_get_machine_name
#   exit codes: 0, 1 EZPZ_MACHINE names none, or as ezpz_get_scheduler_type
ezpz_get_machine_name() (
  _ezpz_plain
  known='aurora crux frontier perlmutter polaris sirius sophia sunspot' best=0 found='' server='' host=$(command uname -n)
  job=$(_ezpz_scheduler) || return 1
  if [ -n "${EZPZ_MACHINE-}" ]; then
    found=$(printf %s "$EZPZ_MACHINE" | command tr '[:upper:]' '[:lower:]')
    known="$known generic-pbs generic-slurm workstation" IFS=:
    for folder in ${EZPZ_MACHINES:-"${XDG_CONFIG_HOME:-${HOME-}/.config}/ezpz/machines"}; do
      [ ! -f "$folder/$found.toml" ] || known="$known $found"
    done
    case $found in *[!a-z0-9_-]*) found=/ ;; esac
    case " $known " in *" $found "*) printf '%s\n' "$found" && return 0 ;; esac
    _ezpz_error "EZPZ_MACHINE=$EZPZ_MACHINE; expected one of $known, or the name of a machine file of yours" || return 1
  fi
  case ${PBS_JOBID-} in *.*) server=${PBS_JOBID#*.} ;; esac
  for name in $known; do
    _ezpz_facts "$name"
    case $job in none | "$scheduler") ;; *) continue ;; esac
    # Believed are first the scheduler and the kernel (3), then what is inherited (2), short names last (1).
    stands=0 against=0
    for sign in $signs; do
      eval "value=\${$sign-}"
      case "$sign $job" in 'SLURM_CLUSTER_NAME slurm') level=3 ;; *) level=2 ;; esac
      case $value in
        "$name") stands=$((stands | level)) && case $host in *.*) _ezpz_under "$host" || against=$((against | 2)) ;; esac ;;
        ?*) against=$((against | level)) ;;
      esac
    done
    ! _ezpz_called "${PBS_O_HOST-}" || stands=$((stands | 2))
    ! _ezpz_under "$host" && ! _ezpz_called "$server" || stands=3
    [ "$stands" != 0 ] || ! _ezpz_called "$host" || stands=1
    { [ "$stands" -gt "$against" ] && [ "$stands" -ge "$best" ]; } || continue
    [ "$stands" -gt "$best" ] || name="$found or $name"
    best=$stands found=$name
  done
  case $found in *' or '*) _ezpz_say "warning: this is $found: set EZPZ_MACHINE to the right one" && found='' ;; esac
  case ${found:-$job} in slurm | pbs) found=generic-$job ;; esac
  printf '%s\n' "${found:-workstation}"
)
# ezpz_get_scheduler_type: print pbs, slurm or none, as the job's variables have it.
#   usage: ezpz_get_scheduler_type
#   exit codes: 0, 1 two jobs at once, half of a job's variables, or another scheduler's job
ezpz_get_scheduler_type() (
  job=$(_ezpz_scheduler) || return 1
  case $job in slurm | pbs | none) printf '%s\n' "$job" && return 0 ;; esac
  _ezpz_error "a job of $job, whose hosts cannot be read here; expected PBS or Slurm: use ezpz-launch with a HOSTFILE"
)
# ezpz_get_job_id: print the id of the job.
#   usage: ezpz_get_job_id
#   exit codes: 0, 1 no job is running in this shell, or as ezpz_get_scheduler_type
ezpz_get_job_id() {
  ezpz_get_scheduler_type >/dev/null || return 1
  [ -z "${SLURM_JOB_ID-}${PBS_JOBID-}" ] || { printf '%s\n' "${SLURM_JOB_ID:-${PBS_JOBID-}}" && return 0; }
  _ezpz_error 'PBS_JOBID and SLURM_JOB_ID are not set; expected a job: call this in one, or ezpz_load_env before'
}
# ezpz_get_num_nodes: print the number of nodes of the job (in a Slurm step: of the step); 1 without a job.
#   usage: ezpz_get_num_nodes
#   exit codes: 0, 1 the hosts cannot be known here, 2 there is no whole clone
ezpz_get_num_nodes() (hosts=$(_ezpz_hosts) && printf '%s\n' "$hosts" | command awk 'END { print NR }')
# ezpz_get_gpus_per_node: print the number of devices (Intel: tiles) that this node shows and the variables for
#   visible devices leave; off the job's nodes, if there are none, that of a node of this machine.
#   usage: ezpz_get_gpus_per_node
#   exit codes: 0, 1 such a variable is wrong, or as ezpz_get_num_nodes
ezpz_get_gpus_per_node() (
  _ezpz_plain
  devices='' count=$(_ezpz_script devices) || return $?
  if [ -z "$count" ]; then
    on=${SLURM_JOB_ID-}${PBS_JOBID-}
    [ -z "$on" ] || on=$(_ezpz_node)
    [ -n "$on" ] || { machine=$(ezpz_get_machine_name) && _ezpz_facts "$machine"; } || return 1
  fi
  printf '%s\n' "${count:-${devices:-0}}"
)
# ezpz_write_hostfile: write the job's hosts (without one: localhost), a line each, and print the file's path.
#   usage: ezpz_write_hostfile [file] (default: ~/.ezpz/hosts-JOBID)
#   exit codes: 0, 1 the file cannot be written, or as ezpz_get_num_nodes
ezpz_write_hostfile() (hosts=$(_ezpz_hosts) && _ezpz_put "${1-}" hosts "$hosts")
# ezpz_set_proxy: reach the network through a proxy; by default, in a job, the machine's, if it has one.
#   usage: ezpz_set_proxy [http://host:port]; exports of http_proxy https_proxy no_proxy, small and capital, those not set
#   exit codes: 0, 1 that is no URL, or as ezpz_get_machine_name
ezpz_set_proxy() { _ezpz_import _ezpz_proxy_facts "${1-}"; }
# ezpz_save_env: write the job's variables, and those of modules and environment, for ezpz_load_env; print the path.
#   usage: ezpz_save_env [file] (default: ~/.ezpz/env-JOBID, replaced on the job's first node only); its mode is 600
#   exit codes: 0, 1 it cannot be written
ezpz_save_env() (umask 077 && _ezpz_put "${1-}" env "$(_ezpz_saved </dev/null)")
# ezpz_load_env: export what ezpz_save_env wrote: a job's shell in another one. The file is read, never executed.
#   usage: ezpz_load_env [file] (default: the newest in ~/.ezpz); exports the variables in it
#   exit codes: 0, 1 there is none, or others may write to it
ezpz_load_env() { _ezpz_import _ezpz_env_facts "${1-}" && { hash -r 2>/dev/null || :; }; }
# ezpz_reset: undo what the functions above did in this shell: environment, conda, modules, variables.
#   usage: ezpz_reset; exports what was there before
#   exit codes: 0, 1 something could not be undone
ezpz_reset() {
  local line did=${_ezpz_did-} code=0
  unset _ezpz_did
  while [ -n "$did" ]; do # the last thing done comes first
    line=${did%%$'\n'*} did=${did#*$'\n'}
    _ezpz_calmly _ezpz_undo "${line%% *}" "${line#* }" || code=1
  done
  hash -r 2>/dev/null || :
  return "$code"
}
# ezpz_help: list these functions.
#   usage: ezpz_help
#   exit codes: 0, 1 utils.sh came from a pipe, and the clone is not to be found
ezpz_help() {
  [ -r "$(_ezpz_self)" ] || _ezpz_error "no $(_ezpz_self): set EZPZ_ROOT to the clone" || return 1
  command awk '/^#/ { text = text "\n" substr($0, 3); next } /^ezpz_[a-z_]*\(\)/ { print substr(text, 2) "\n" } { text = "" }' "$(_ezpz_self)"
}

_ezpz_error() { printf 'ezpz: error: %s\n' "$*" >&2 && return 1; }
_ezpz_say() { case ${EZPZ_LOG_LEVEL-}:$* in [Ww]*:'warning: '* | [!WwEeCc]*) printf 'ezpz: %s\n' "$*" >&2 ;; esac }
_ezpz_report() { _ezpz_say "$(command cat "$VIRTUAL_ENV/.ezpz/summary"), environment $VIRTUAL_ENV, $(($(command date +%s) - $1)) s"; }
# In a subshell: our options, not yours. -f: unquoted lists are split, never globbed.
_ezpz_plain() {
  [ -z "${ZSH_VERSION-}" ] || emulate sh
  set +euC -f && set +o pipefail && trap - ERR DEBUG && IFS=$' \t\n'
}
# In your shell: what others wrote (modules, conda) bears neither -u nor -e.
_ezpz_calmly() {
  local IFS=$' \t\n' nounset=+u code=0
  [ -z "${ZSH_VERSION-}" ] || emulate -L sh # until this function ends
  case $- in *u*) nounset=-u && set +u ;; esac
  "$@" || code=$?
  set "$nounset"
  return "$code"
}
# Exports the lines NAME=value that a function prints (~n is a line end in them, ~t a tilde), for ezpz_reset to undo.
_ezpz_import() {
  local text line name value was nl=$'\n' n='~n' t='~t' tilde='~'
  text=$("$@") || return $?
  while [ -n "$text" ]; do
    line=${text%%"$nl"*} text=${text#"$line"} text=${text#"$nl"}
    name=${line%%=*} value=${line#*=} value=${value//"$n"/$nl} value=${value//"$t"/$tilde}
    eval "was=\${$name-} line=\${$name+export}"
    case $line$was in "export$value" | *"$nl"*) ;; *) _ezpz_done "${line:-unset} $name${line:+=$was}" ;; esac
    export "$name=$value"
  done
}
_ezpz_done() { _ezpz_did="$1"$'\n'"${_ezpz_did-}"; }
_ezpz_undo() {
  case $1 in
    unset) unset "$2" ;;
    export) export "${2?}" ;;
    use) module unuse "$2" >&2 ;;
    load) module unload "$2" >&2 ;;
    conda) conda deactivate >&2 ;;
    venv) [ "${VIRTUAL_ENV-}" != "$2" ] || deactivate ;;
  esac || _ezpz_error "cannot undo: $*"
}
_ezpz_first() { # on PATH
  local rest=":$PATH:"
  case $rest in *":$1:"*) rest=${rest%%":$1:"*}:${rest#*":$1:"} ;; esac
  rest=${rest#:} && export PATH="$1:${rest%:}"
}

# What ezpz_topo/machines/*.toml say of machine $1; a test holds both together.
# shellcheck disable=SC2034 # read by the callers, each some of them
_ezpz_facts() {
  local site=alcf.anl.gov soft=/soft/modulefiles
  scheduler=pbs hosts='' signs='' folders='' wanted='' conda='' devices='' domain='' proxy=http://proxy.alcf.anl.gov:3128
  case $1 in
    aurora) hosts=aurora-uan- wanted=frameworks devices=12 ;;
    sunspot) wanted=frameworks devices=12 ;;
    crux) hosts='crux-login- crux-uan-' devices=0 ;;
    polaris) hosts=polaris-login- folders=$soft wanted=conda conda=base devices=4 ;;
    sirius) hosts=sirius-uan- folders=$soft wanted=conda conda=base devices=4 ;;
    sophia) hosts='sophia-login- sophia-gpu- sophia-pbs-' folders=$soft wanted=conda conda=base devices=8 ;;
    perlmutter) site=nersc.gov signs='NERSC_HOST SLURM_CLUSTER_NAME' wanted=pytorch devices=4 proxy='' ;;
    frontier) site=olcf.ornl.gov hosts=frontier signs='LMOD_SYSTEM_NAME SLURM_CLUSTER_NAME' wanted=rocm devices=8 proxy=http://proxy.ccs.ornl.gov:3128 ;;
    *) proxy='' && return 0 ;;
  esac
  domain=$1.$site
  [ -z "$signs" ] || scheduler=slurm
}
_ezpz_under() { case .$1 in *."$domain") ;; *) return 1 ;; esac }
_ezpz_called() { # in its domain, or a short name: one of its stems, then digits
  local name=${1%%.*} digits
  digits=${name##*[!0-9]}
  name=${name%"$digits"}
  case ${digits:+${name:+" $hosts "}} in *" $name "*) ;; *) _ezpz_under "$1" ;; esac
}
# Whose job this is, by its variables.
_ezpz_scheduler() {
  local wrong=''
  [ -z "${PBS_ENVIRONMENT-}" ] || [ -n "${PBS_JOBID-}${SLURM_JOB_ID-}" ] || wrong="PBS_ENVIRONMENT=$PBS_ENVIRONMENT without PBS_JOBID"
  [ -z "${SLURM_JOBID-}${SLURM_JOB_NODELIST-}" ] || [ -n "${PBS_JOBID-}${SLURM_JOB_ID-}" ] || wrong='SLURM_JOBID or SLURM_JOB_NODELIST without SLURM_JOB_ID'
  [ -z "${SLURM_JOB_ID-}" ] || [ -z "${PBS_JOBID-}" ] || wrong="SLURM_JOB_ID=$SLURM_JOB_ID and PBS_JOBID=$PBS_JOBID"
  [ -z "$wrong" ] || _ezpz_error "$wrong; expected the variables of one job: unset what is left over from another shell" || return 1
  wrong=${SLURM_JOB_ID:+slurm}${PBS_JOBID:+pbs}
  [ -n "$wrong" ] || wrong=${FLUX_JOB_ID:+flux}${LSB_JOBID:+lsf}${COBALT_JOBID:+cobalt}
  printf '%s\n' "${wrong:-none}"
}
# Runs a script of the clone, which may read these variables, exported or not.
_ezpz_script() (
  root=$(_ezpz_root) || return 2
  for name in MACHINE VENV PYTHON SITE_PACKAGES WHEELS LOG_LEVEL; do eval "export EZPZ_$name=\"\${EZPZ_$name-}\""; done
  BASH_ENV='' command bash "$root/scripts/$1" "${@:2}"
)
_ezpz_hosts() { job=$(ezpz_get_scheduler_type) && _ezpz_script hosts "$job"; }
_ezpz_node() (host=${SLURMD_NODENAME:-$(command uname -n)} && _ezpz_hosts | command awk -F. -v host="${host%%.*}" 'tolower($1) == tolower(host) { print NR }')
_ezpz_job_facts() (
  _ezpz_plain
  scheduler=$(ezpz_get_scheduler_type) || return 1
  job=${SLURM_JOB_ID:-${PBS_JOBID:-none}}
  [ "${EZPZ_JOB:-$job}" = "$job" ] || unset EZPZ_SCHEDULER EZPZ_NODES EZPZ_GPUS_PER_NODE EZPZ_HOSTFILE
  nodes=${EZPZ_NODES:-$(ezpz_get_num_nodes)} && devices=${EZPZ_GPUS_PER_NODE:-$(ezpz_get_gpus_per_node)} || return $?
  printf '%s\n' "EZPZ_JOB=$job" "EZPZ_SCHEDULER=${EZPZ_SCHEDULER:-$scheduler}" "EZPZ_NODES=$nodes" "EZPZ_GPUS_PER_NODE=$devices"
  [ "$job" = none ] || { file=${EZPZ_HOSTFILE:-$(ezpz_write_hostfile "")} && printf '%s\n' "EZPZ_HOSTFILE=$file"; }
)
_ezpz_proxy_facts() (
  _ezpz_plain
  machine=$(ezpz_get_machine_name) || return 1
  _ezpz_facts "$machine"
  [ -n "${SLURM_JOB_ID-}${PBS_JOBID-}" ] || proxy='' # login nodes have a network
  url=${1:-$proxy}
  case $url in '') return 0 ;; http://?* | https://?* | socks*://?*) ;; *)
    _ezpz_error "$url is no proxy; expected its URL, such as http://proxy.example.org:3128" || return 1
    ;;
  esac
  for name in http_proxy:HTTP_PROXY https_proxy:HTTPS_PROXY no_proxy:NO_PROXY; do
    small=${name%:*} capital=${name#*:}
    [ "$small" != no_proxy ] || url=localhost,127.0.0.1,::1${domain:+,.${domain#*.}}
    eval "value=\${$small-\${$capital-\$url}} set=\${$small+1} SET=\${$capital+1}" # one that is set holds for both
    [ -n "$set" ] || printf '%s\n' "$small=$value"
    [ -n "$SET" ] || printf '%s\n' "$capital=$value"
  done
)
# The lines of standard input, or, if it is empty, of the environment, whose variables are saved: those of the
# job, but not of a rank or a step in it, and those of modules and environments.
_ezpz_saved() {
  command awk 'function kept(n) { return n !~ /^(SLURM_(STEP|PROCID|LOCALID|NODEID|GTIDS|TASK_PID|SRUN)|PBS_JOBCOOKIE)/ &&
      n !~ /^EZPZ_(RANK|LOCAL_|WORLD_SIZE|NODE_RANK|NUM_NODES|JOB_ID|LAUNCH|CONTROL|SPAWN)/ &&
      (n ~ /^((PBS|SLURM|EZPZ|MASTER|LMOD|CONDA|CCL|FI|NCCL|ZE|MPICH|CUDA|ROCM|__LMOD)_|_ModuleTable)[A-Za-z0-9_]+$/ ||
        n ~ /^(MODULE[A-Z]+|LOADEDMODULES|_LMFILES_|VIRTUAL_ENV|(LD_LIBRARY_|LIBRARY_|PYTHON|C|MAN)?PATH|(http|https|no)_proxy|(HTTP|HTTPS|NO)_PROXY)$/) }
    { n = $0; sub(/=.*/, "", n); if (/=/ && kept(n)) print }
    END { if (!NR) for (n in ENVIRON) if (kept(n)) { v = ENVIRON[n]; gsub(/~/, "~t", v); gsub(/\n/, "~n", v); print n "=" v } }'
}
_ezpz_env_facts() (
  _ezpz_plain
  file=$1
  [ -n "$file" ] || { folder=$(_ezpz_folder) && file=$folder/$(command ls -t "$folder" | command grep -m 1 '^env-'); }
  { [ -f "$file" ] && command grep -q '^PATH=' "$file"; } ||
    _ezpz_error "$file is no saved environment; expected a file of ezpz_save_env: call that in the job" || return 1
  [ -O "$file" ] && [ -z "$(command find -H "$file" -prune \( -perm -020 -o -perm -002 \))" ] ||
    _ezpz_error "$file is not yours alone to write; expected a file of your own with mode 600: save it again" || return 1
  _ezpz_say "variables of $file" && _ezpz_saved <"$file"
)
_ezpz_folder() {
  for folder in "${HOME:-/nowhere}/.ezpz" "${TMPDIR:-/tmp}/ezpz-$(command id -u)"; do
    command mkdir -p -m 700 "$folder" 2>/dev/null
    [ -d "$folder" ] && [ -O "$folder" ] && [ -w "$folder" ] && printf '%s\n' "$folder" && return 0
  done
  _ezpz_error "${HOME-}/.ezpz and ${TMPDIR:-/tmp} cannot be written; expected a place for a small file: name one, or set TMPDIR"
}
# Writes the text $3, so that it is seen whole or not at all, into the file $1, or if empty $2-JOBID in our folder.
_ezpz_put() {
  _ezpz_plain
  case $1 in /*) file=$1 ;; ?*) file=$PWD/$1 ;; *)
    folder=$(_ezpz_folder) || return 1
    file=$folder/$2-$(printf %s "${SLURM_JOB_ID:-${PBS_JOBID:-local}}" | command tr -c 'A-Za-z0-9.-' _)
    case $2$(_ezpz_node 2>/dev/null) in env | env1) ;; env*) [ ! -f "$file" ] || { printf '%s\n' "$file" && return 0; } ;; esac
    ;;
  esac
  { { [ ! -e "$file" ] || [ -f "$file" ]; } && printf '%s\n' "$3" >"$file.$$" && command mv -f "$file.$$" "$file"; } 2>/dev/null ||
    _ezpz_error "$file cannot be written; expected a file in a folder of yours: name another" || return 1
  printf '%s\n' "$file"
}
_ezpz_load() {
  local machine scheduler hosts signs folders wanted conda devices proxy domain name code=0 was=$PATH venv=${VIRTUAL_ENV-} prefix=${CONDA_PREFIX-}
  machine=$(ezpz_get_machine_name) || return 1
  _ezpz_facts "$machine"
  wanted=${EZPZ_MODULES-$wanted}
  [ -n "$wanted" ] || return 0
  command -v module >/dev/null 2>&1 ||
    _ezpz_error "no command 'module' in this shell, and $machine needs: $wanted. Remedy: a login shell (bash -l), . \$MODULESHOME/init/bash, or EZPZ_MODULES= for none" || return 1
  [ -n "${MODULEPATH-}" ] ||
    _ezpz_error "MODULEPATH is empty, so 'module load $wanted' would do nothing; expected the site's folders: start a login shell, or EZPZ_MODULES= for none" || return 1
  for name in $wanted; do
    ! _ezpz_is_loaded "$name" || continue
    case :$MODULEPATH: in *":${folders:-$MODULEPATH}:"*) ;; *) module use "$folders" >&2 && _ezpz_done "use $folders" && folders='' ;; esac
    module load "$name" >&2 && _ezpz_is_loaded "$name" && _ezpz_done "load $name" && continue
    _ezpz_error "module load $name failed on $machine (loaded: ${LOADEDMODULES:-none}): see above, and module avail $name; or name others in EZPZ_MODULES" || { code=1 && break; }
  done
  case "$code$prefix ${conda:+$wanted }" in '0 '*' conda'[\ /]* | '0 conda'[\ /]*)
    { conda activate "$conda" >&2 && _ezpz_done "conda $conda"; } || _ezpz_error "conda activate $conda failed: see above, and module show $wanted" || code=1
    ;;
  esac
  _ezpz_keep CONDA_PREFIX "$prefix" && _ezpz_keep VIRTUAL_ENV "$venv"
  return "$code"
}
_ezpz_is_loaded() { case :${LOADEDMODULES-}: in *":$1:"* | *":$1/"*) ;; *) return 1 ;; esac }
# What was active stays so, whatever a module put in its place.
_ezpz_keep() {
  case :$was: in *":${2:-/}/bin:"*) export "$1=$2" ;; *) return 0 ;; esac
  case :$was:$'\n':$PATH: in # the first of both, or on both behind something else
    ":$2/bin:"*$'\n':"$2/bin:"*) return 0 ;;
    ":$2/bin:"*) ;;
    *$'\n'*":$2/bin:"*) return 0 ;;
  esac
  _ezpz_say "warning: a module took $2/bin, which is active, from its place on PATH: put back" && _ezpz_first "$2/bin"
}

# The clone's folder.
_ezpz_root() {
  local root
  root=$(CDPATH='' builtin cd -P -- "$(command dirname -- "$(_ezpz_self)")" 2>/dev/null && builtin pwd -P)
  { [ -f "$root/constraints.txt" ] && [ -f "$root/packages/ezpz-suite/pyproject.toml" ] && printf '%s\n' "$root"; } ||
    _ezpz_error "no packages/ and constraints.txt beside $(_ezpz_self): source the utils.sh of a whole clone, or set EZPZ_ROOT to it" || return 2
}
# Makes the environment in a process of its own, and activates it here; where it is active, its bin comes first on PATH.
_ezpz_python() {
  local venv
  venv=$(ezpz_get_machine_name) && venv=$(_ezpz_script environment "$venv" "$@") || return $?
  [ ! "${VIRTUAL_ENV-}" -ef "$venv" ] || { _ezpz_first "$VIRTUAL_ENV/bin" && return 0; }
  # shellcheck disable=SC1091 # made by python -m venv, not there when checking
  . "$venv/bin/activate" && [ "${VIRTUAL_ENV-}" -ef "$venv" ] && _ezpz_done "venv $VIRTUAL_ENV" && return 0
  _ezpz_error "$venv/bin/activate activated ${VIRTUAL_ENV:-nothing}: remove $venv and call ezpz_setup_env again"
}
# Defines _ezpz_self, which prints the absolute path of this file: only now can it be asked. From a pipe there is
# none, and the clone is $EZPZ_ROOT or the working directory.
_ezpz_locate() {
  local file='' link
  if [ -n "${ZSH_VERSION-}" ]; then
    # shellcheck disable=SC2016 # for zsh to expand; bash could not parse it
    eval 'file=${${(%):-%x}:A}'
  else
    file=${BASH_SOURCE[0]-}
    while [ -f "$file" ] && [ -L "$file" ]; do
      link=$(command readlink "$file") || return 1
      case $link in /*) file=$link ;; *) file=$(command dirname -- "$file")/$link ;; esac
    done
    file=$(CDPATH='' builtin cd -P -- "$(command dirname -- "$file")" >/dev/null && builtin pwd -P)/${file##*/}
  fi
  [ ! -f "$file" ] || eval "_ezpz_self() { printf '%s\\n' $(printf '%q' "$file"); }"
}
_ezpz_self() { printf '%s\n' "${EZPZ_ROOT:-$PWD}/utils.sh"; }

# Executed, or sourced from another shell, it could not do its work.
case ${BASH_VERSION:+bash}${ZSH_VERSION:+zsh:${ZSH_EVAL_CONTEXT-}} in
  bash) [ "${BASH_SOURCE[0]-$0}" != "$0" ] ;;
  zsh*:file*) ;;
  *) false ;;
esac || {
  printf '%s\n' 'utils.sh: do not execute it; in bash or zsh: source utils.sh' >&2
  # shellcheck disable=SC2317 # return fails where the file is executed
  return 2 2>/dev/null || exit 2
}
_ezpz_locate
