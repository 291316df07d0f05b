# shellcheck shell=bash
# utils.sh: a login or compute node, a workstation or a Mac made ready, in the shell you are in.
#   source utils.sh && ezpz_setup_env && ezpz-launch python -m ezpz.examples.minimal
# For bash >= 3.2 and zsh; needs Python >= 3.11. Sourcing it only defines functions: ezpz_* for you (ezpz_help
# lists them), _ezpz_* for itself. Messages go to stderr, answers to stdout. Settings, all optional:
#   EZPZ_MACHINE          the machine, where it cannot be told
#   EZPZ_MODULES          modules to load instead of the machine's, with a space between; empty: none
#   EZPZ_PYTHON           the Python to build the environment with (default: look for one)
#   EZPZ_VENV             where the environment is (default: as ezpz_setup_python says)
#   EZPZ_SITE_PACKAGES=0  do not re-use the torch, mpi4py and numpy of that Python
#   EZPZ_WHEELS           a folder of wheels to install from, instead of an index
#   EZPZ_ROOT             the clone, where this comes from a pipe: source <(cat utils.sh)
#   EZPZ_LOG_LEVEL        WARNING: only warnings and errors
#   PIP_*, UV_*, MPICC    as pip, uv and mpi4py read them; an empty MPICC asks for mpi4py's wheel

# ezpz_setup_env: all of it, in order: job, modules, proxy, Python. Call it again to repair.
#   usage: ezpz_setup_env; exports what these export
#   exit codes: 0 ready, 1 a step failed, 2 there is no whole clone
ezpz_setup_env() {
  local start
  start=$(command date +%s)
  { _ezpz_root >/dev/null && ezpz_setup_job && ezpz_load_modules && ezpz_set_proxy && _ezpz_python; } || return $?
  _ezpz_say "$(ezpz_get_machine_name), scheduler $EZPZ_SCHEDULER, job $EZPZ_JOB, $EZPZ_NODES nodes x $EZPZ_GPUS_PER_NODE devices"
  _ezpz_report "$start"
}

# ezpz_setup_job: tell the job's facts. One that is set stays, unless EZPZ_JOB is another job (qsub -V).
#   usage: ezpz_setup_job; exports EZPZ_JOB (its id, or none) EZPZ_SCHEDULER (pbs, slurm, none) EZPZ_NODES
#     EZPZ_GPUS_PER_NODE, and in a job EZPZ_HOSTFILE. None of them is read by ezpz_topo.
#   exit codes: 0, 1 the job's variables contradict each other, or its hosts cannot be known here
ezpz_setup_job() { _ezpz_import _ezpz_job_facts; }

# ezpz_setup_python: make (or find) the environment of the clone, install the packages, activate it. An active
#   one is used as it is; else $EZPZ_VENV; else .venv in the clone (on a known machine .venv/<machine>-py<minor>;
#   where the clone cannot be written, in ~/.local/share/ezpz). What torch, mpi4py and MPI the site has are kept.
#   usage: ezpz_setup_python; exports what bin/activate does (VIRTUAL_ENV, PATH)
#   exit codes: 0 active, 1 a step failed, 2 there is no whole clone
ezpz_setup_python() { ezpz_install; }

# ezpz_install: install packages of the clone, editable, with what they need, into that environment.
#   usage: ezpz_install [ezpz-tp...] (default: all); exports what ezpz_setup_python does
#   exit codes: as ezpz_setup_python
ezpz_install() {
  local start
  start=$(command date +%s)
  _ezpz_python "$@" && _ezpz_report "$start"
}

# ezpz_load_modules: load the machine's modules, or $EZPZ_MODULES, and its conda environment, where none is active.
#   usage: ezpz_load_modules; exports what the modules do
#   exit codes: 0 all are loaded, 1 one is not, or there are no modules to choose from
ezpz_load_modules() { _ezpz_calmly _ezpz_load_modules; }

# ezpz_get_machine_name: print aurora, crux, frontier, perlmutter, polaris, sirius, sophia or sunspot, else
#   generic-pbs, generic-slurm or workstation: what ezpz_topo says, but for the match rules of your own files.
#   usage: ezpz_get_machine_name; exports nothing
#   exit codes: 0, 1 EZPZ_MACHINE names none, or as ezpz_get_scheduler_type
ezpz_get_machine_name() (
  _ezpz_plain
  known='aurora crux frontier perlmutter polaris sirius sophia sunspot' best=0 found=''
  asked=$(printf %s "${EZPZ_MACHINE-}" | command tr '[:upper:]' '[:lower:]')
  [ -z "$asked" ] || _ezpz_is_machine "$asked" ||
    _ezpz_error "EZPZ_MACHINE=$EZPZ_MACHINE; expected one of $known generic-pbs generic-slurm workstation, or a machine file of yours" || return 1
  job=$(_ezpz_scheduler) || return 1
  [ -z "$asked" ] || { printf '%s\n' "$asked" && return 0; }
  host=$(command uname -n) server=''
  case ${PBS_JOBID-} in *.*) server=${PBS_JOBID#*.} ;; esac
  for name in $known; do
    _ezpz_facts "$name"
    case $job in none | "$scheduler") ;; *) continue ;; esac
    # Believed are first the scheduler and the kernel (3), then what is inherited (2), short names last (1).
    stands=0 against=0
    for sign in $signs; do
      eval "value=\${$sign-}" && level=2
      [ "$sign $job" != 'SLURM_CLUSTER_NAME slurm' ] || level=3
      case $value in
        '') ;;
        "$name")
          stands=$((level > stands ? level : stands))
          case $host in *.*) _ezpz_under "$host" || against=$((against > 2 ? against : 2)) ;; esac
          ;;
        *) against=$((level > against ? level : against)) ;;
      esac
    done
    if _ezpz_under "$host" || _ezpz_under "$server" || _ezpz_called "$server"; then
      stands=3
    elif _ezpz_under "${PBS_O_HOST-}" || _ezpz_called "${PBS_O_HOST-}"; then
      stands=$((stands > 2 ? stands : 2))
    elif _ezpz_called "$host"; then
      stands=$((stands > 1 ? stands : 1))
    fi
    [ "$stands" -gt "$against" ] && [ "$stands" -ge "$best" ] || continue
    [ "$stands" -gt "$best" ] || name="$found or $name"
    best=$stands found=$name
  done
  case $found in *' or '*) _ezpz_warn "this is $found: set EZPZ_MACHINE to the right one" && found='' ;; esac
  case ${found:-$job} in slurm | pbs) found=generic-$job ;; esac
  printf '%s\n' "${found:-workstation}"
)

# ezpz_get_scheduler_type: print pbs, slurm or none, as the job's variables have it.
#   usage: ezpz_get_scheduler_type; exports nothing
#   exit codes: 0, 1 two jobs at once, half of a job's variables, or another scheduler's job
ezpz_get_scheduler_type() (
  _ezpz_plain
  job=$(_ezpz_scheduler) || return 1
  case $job in slurm | pbs | none) printf '%s\n' "$job" ;; *)
    _ezpz_error "this is a job of $job, whose hosts cannot be read here; expected PBS or Slurm: use ezpz-launch with a HOSTFILE"
    ;;
  esac
)

# ezpz_get_job_id: print the id of the job.
#   usage: ezpz_get_job_id; exports nothing
#   exit codes: 0, 1 no job is running in this shell, or as ezpz_get_scheduler_type
ezpz_get_job_id() (
  job=$(ezpz_get_scheduler_type) || return 1
  [ "$job" != none ] || _ezpz_error 'neither PBS_JOBID nor SLURM_JOB_ID is set; expected a job: call this in one, or ezpz_load_env before' || return 1
  printf '%s\n' "${SLURM_JOB_ID:-${PBS_JOBID-}}"
)

# ezpz_get_num_nodes: print the number of nodes of the job (in a Slurm step: of the step); 1 without a job.
#   usage: ezpz_get_num_nodes; exports nothing
#   exit codes: 0, 1 the hosts cannot be known here
ezpz_get_num_nodes() (
  _ezpz_plain
  hosts=$(_ezpz_hosts) || return 1
  printf '%s\n' "$hosts" | command awk 'END { print NR }'
)

# ezpz_get_gpus_per_node: print the number of devices (tiles on Intel) that this node shows and the variables
#   for visible devices leave; off the job's nodes, where there are none, those of a node of this machine.
#   usage: ezpz_get_gpus_per_node; exports nothing
#   exit codes: 0, 1 a variable is wrong, or as ezpz_get_num_nodes
ezpz_get_gpus_per_node() (
  _ezpz_plain
  devices='' count=$(_ezpz_devices "") || return 1
  if [ -z "$count" ] && ! _ezpz_is_on_node; then
    machine=$(ezpz_get_machine_name) || return 1
    _ezpz_facts "$machine"
  fi
  printf '%s\n' "${count:-${devices:-0}}"
)

# ezpz_write_hostfile: write the job's hosts (without one: localhost), one a line and each once; print the path.
#   usage: ezpz_write_hostfile [file] (default: ~/.ezpz/hosts-JOBID); exports nothing
#   exit codes: 0, 1 the hosts cannot be known here, or the file cannot be written
ezpz_write_hostfile() (
  _ezpz_plain
  hosts=$(_ezpz_hosts) && file=$(_ezpz_file "${1-}" hosts) || return 1
  _ezpz_put "$file" "$hosts" && printf '%s\n' "$file"
)

# ezpz_set_proxy: reach the network through $1; by default, in a job, through the machine's proxy, if it has one.
#   usage: ezpz_set_proxy [http://host:port]; exports http_proxy https_proxy no_proxy, and in capitals; none that is set
#   exit codes: 0, 1 that is no URL, or as ezpz_get_machine_name
ezpz_set_proxy() { _ezpz_import _ezpz_proxy_facts "$@"; }

# ezpz_save_env: write the job's variables, with those of modules and environment, for another shell to load.
#   usage: ezpz_save_env [file] (default: ~/.ezpz/env-JOBID; mode 600); prints its path; exports nothing
#   exit codes: 0, 1 it cannot be written
ezpz_save_env() (
  _ezpz_plain
  umask 077
  file=$(_ezpz_file "${1-}" env) || return 1
  _ezpz_put "$file" "$(_ezpz_saved </dev/null)" && printf '%s\n' "$file"
)

# ezpz_load_env: export what ezpz_save_env wrote. The file is read, never executed.
#   usage: ezpz_load_env [file] (default: the newest in ~/.ezpz); exports the variables in it
#   exit codes: 0, 1 there is none, or it is not yours alone to write
ezpz_load_env() { _ezpz_import _ezpz_load_facts "$@" && hash -r; }

# ezpz_reset: undo what the functions above did in this shell: environment, modules, variables; what you changed stays.
#   usage: ezpz_reset; exports what was there before
#   exit codes: 0, 1 something could not be undone
ezpz_reset() {
  local line did=${_ezpz_did-} code=0
  unset _ezpz_did
  while [ -n "$did" ]; do
    line=${did%%$'\n'*} did=${did#*$'\n'}
    case $line in
      'unset '*) unset "${line#* }" ;;
      'export '*) export "${line#* }" ;;
      *) _ezpz_calmly _ezpz_undo "${line%% *}" "${line#* }" || code=1 ;;
    esac
  done
  hash -r
  return "$code"
}

# ezpz_help: list these functions.
#   usage: ezpz_help; exports nothing
#   exit codes: 0, 1 utils.sh came from a pipe, and is not in the clone
ezpz_help() {
  [ -r "$(_ezpz_self)" ] || _ezpz_error "no utils.sh at $(_ezpz_self): set EZPZ_ROOT to the clone" || return 1
  command awk '/^#/ { text = text "\n" substr($0, 3); next }
    /^ezpz_[a-z_]*\(\)/ { print substr(text, 2) "\n" }
    { text = "" }' "$(_ezpz_self)"
}

_ezpz_error() { printf 'ezpz: error: %s\n' "$*" >&2 && return 1; }
_ezpz_warn() { case ${EZPZ_LOG_LEVEL-} in [EeCc]*) ;; *) printf 'ezpz: warning: %s\n' "$*" >&2 ;; esac }
_ezpz_say() { case ${EZPZ_LOG_LEVEL-} in [WwEeCc]*) ;; *) printf 'ezpz: %s\n' "$*" >&2 ;; esac }

# In a subshell: with our options, not yours. -f: unquoted lists are split, never globbed.
_ezpz_plain() {
  [ -z "${ZSH_VERSION-}" ] || emulate sh
  set +euC -f
  set +o pipefail
  trap - ERR DEBUG
  IFS=$' \t\n'
}

# In your shell: what others wrote (modules, conda) bears neither -u nor -e.
_ezpz_calmly() {
  local IFS=$' \t\n' nounset=+u code=0
  [ -z "${ZSH_VERSION-}" ] || emulate -L sh # and its options end with this function
  case $- in *u*) nounset=-u ;; esac
  set +u
  "$@" || code=$?
  set "$nounset"
  return "$code"
}

# Exports the lines NAME=value that a function prints (~n is a line end in them, ~t a tilde), for ezpz_reset to undo.
_ezpz_import() {
  local text line name value was nl=$'\n' n='~n' t='~t'
  text=$("$@") || return $?
  while [ -n "$text" ]; do
    line=${text%%"$nl"*} text=${text#"$line"} text=${text#"$nl"}
    name=${line%%=*} value=${line#*=}
    value=${value//"$n"/$nl} value=${value//"$t"/'~'}
    eval "was=\${$name-} line=\${$name+export}"
    [ "$line$was" = "export$value" ] || case $was in *"$nl"*) ;; *)
      _ezpz_note_did "${line:-unset} $name${line:+=$was}"
      ;;
    esac
    export "$name=$value"
  done
}
_ezpz_note_did() { _ezpz_did="$1"$'\n'"${_ezpz_did-}"; }

# What ezpz_topo/machines/*.toml say of machine $1; a test holds both together.
# shellcheck disable=SC2034 # read by the callers, each some of them
_ezpz_facts() {
  local site=alcf.anl.gov
  scheduler=pbs hosts='' signs='' folders='' wanted='' conda='' devices='' suffix='' proxy=http://proxy.alcf.anl.gov:3128
  case $1 in
    aurora) hosts=aurora-uan- wanted=frameworks devices=12 ;;
    sunspot) wanted=frameworks devices=12 ;;
    crux) hosts='crux-login- crux-uan-' devices=0 ;;
    polaris) hosts=polaris-login- folders=/soft/modulefiles wanted=conda conda=base devices=4 ;;
    sirius) hosts=sirius-uan- folders=/soft/modulefiles wanted=conda conda=base devices=4 ;;
    sophia) hosts='sophia-login- sophia-gpu- sophia-pbs-' folders=/soft/modulefiles wanted=conda conda=base devices=8 ;;
    perlmutter) scheduler=slurm site=nersc.gov signs='NERSC_HOST SLURM_CLUSTER_NAME' wanted=pytorch devices=4 proxy='' ;;
    frontier)
      scheduler=slurm site=olcf.ornl.gov hosts=frontier signs='LMOD_SYSTEM_NAME SLURM_CLUSTER_NAME'
      wanted=rocm devices=8 proxy=http://proxy.ccs.ornl.gov:3128
      ;;
    *) proxy='' && return 0 ;;
  esac
  domain=$1.$site suffix=.$site
}
_ezpz_under() { case .$1 in *."$domain") ;; *) return 1 ;; esac }
_ezpz_called() { # a short host name: a stem of the machine's, then digits
  local name=${1%%.*} digits
  digits=${name##*[!0-9]}
  name=${name%"$digits"}
  [ -n "$digits" ] && [ -n "$name" ] && case " $hosts " in *" $name "*) ;; *) return 1 ;; esac
}
_ezpz_is_machine() {
  local IFS=: folder
  case " $known generic-pbs generic-slurm workstation " in *" $1 "*) return 0 ;; esac
  case $1 in *[!a-z0-9_-]*) return 1 ;; esac
  for folder in ${EZPZ_MACHINES:-${XDG_CONFIG_HOME:-${HOME-}/.config}/ezpz/machines}; do [ ! -f "$folder/$1.toml" ] || return 0; done
  return 1
}

# Whose job this is, by its variables.
_ezpz_scheduler() {
  case ${SLURM_JOB_ID:+slurm}${PBS_JOBID:+pbs} in
    slurmpbs) _ezpz_error "SLURM_JOB_ID=$SLURM_JOB_ID and PBS_JOBID=$PBS_JOBID; expected one job: unset the one left over from another shell" ;;
    ?*) printf '%s\n' "${SLURM_JOB_ID:+slurm}${PBS_JOBID:+pbs}" ;;
    *)
      [ -z "${SLURM_JOBID-}${SLURM_JOB_NODELIST-}" ] ||
        _ezpz_error "SLURM_JOBID=${SLURM_JOBID-} SLURM_JOB_NODELIST=${SLURM_JOB_NODELIST-} without SLURM_JOB_ID; expected a job to set it: set it, or unset these" || return 1
      [ -z "${PBS_ENVIRONMENT-}" ] ||
        _ezpz_error "PBS_ENVIRONMENT=$PBS_ENVIRONMENT without PBS_JOBID; expected a job to set both: set PBS_JOBID, or unset this" || return 1
      set -- ${FLUX_JOB_ID:+flux} ${LSB_JOBID:+lsf} ${COBALT_JOBID:+cobalt} none
      printf '%s\n' "$1"
      ;;
  esac
}

# The job's hosts, one a line, each once (by short name) and in order.
_ezpz_hosts() {
  local job list found
  job=$(ezpz_get_scheduler_type) || return 1
  case $job in
    none) found=localhost ;;
    pbs) found=$(command cat "${PBS_NODEFILE-}" 2>/dev/null) ||
      _ezpz_error "PBS_NODEFILE=${PBS_NODEFILE-} cannot be read; expected the node file, which is on the job's first node only: call this there" || return 1 ;;
    slurm)
      list=$(_ezpz_nodelist) || return 1
      found=$(_ezpz_expand "$list") || return 1
      # A step's variables are handed on to a job submitted in it: then they are of other nodes.
      case ${SLURM_STEP_ID:-42949672} in 42949672*) ;; *)
        list=$(_ezpz_expand "${SLURM_STEP_NODELIST-}") || return 1
        ! printf '%s\n' "$found" | command awk -v step="$list" 'BEGIN { n = split(step, s, "\n") } { job[$1] } END { for (i = 1; i <= n; i++) if (!(s[i] in job)) exit 1 }' ||
          found=$list
        ;;
      esac
      ;;
  esac
  printf '%s\n' "$found" | command awk '{ sub(/#.*/, ""); sub(/\r$/, "") } !NF { next }
    $1 !~ /^[A-Za-z0-9_:][A-Za-z0-9_.:-]*$/ { bad = 1; exit }
    { key = tolower($1); if (key !~ /:|^[0-9.]+$/) sub(/[.].*/, "", key) } !(key in seen) { seen[key]; print $1 }
    END { exit bad || !NR }' || _ezpz_error "the hosts of this $job job are no names, one a line: '$(printf %s "$found" | command head -c 60)'"
}
_ezpz_nodelist() {
  local list=${SLURM_JOB_NODELIST-} k=0
  [ -z "${SLURM_HET_SIZE-}" ] || list=''
  while [ "$k" -lt "${SLURM_HET_SIZE:-0}" ]; do eval "list=\$list\${list:+,}\${SLURM_JOB_NODELIST_HET_GROUP_$k-}" && k=$((k + 1)); done
  [ -n "$list" ] || _ezpz_error "SLURM_JOB_ID=$SLURM_JOB_ID without SLURM_JOB_NODELIST; expected Slurm to set both: unset SLURM_JOB_ID if no job is running" || return 1
  printf '%s\n' "$list"
}
_ezpz_expand() {
  case $1 in
    *\[*) command scontrol show hostnames "$1" 2>/dev/null || _ezpz_error "scontrol cannot expand '$1'; expected Slurm's commands on PATH and a nodelist: load the site's slurm module" ;;
    *) printf '%s\n' "$1" | command tr ', ' '\n\n' ;;
  esac
}
_ezpz_is_on_node() {
  local host
  [ -n "${SLURM_JOB_ID-}${PBS_JOBID-}" ] || return 1
  host=${SLURMD_NODENAME:-$(command uname -n)}
  _ezpz_hosts | command awk -v host="${host%%.*}" '{ sub(/[.].*/, "") } tolower($1) == tolower(host) { found = 1 } END { exit !found }'
}

# The devices of this host, counted as ezpz_topo does without the vendors' tools; nothing where none is to be
# seen, and none is hidden. $1: where dev and sys are.
_ezpz_devices() {
  local n=0 file
  case ${TORCH_DEVICE-} in cpu*) printf '0\n' && return 0 ;; esac
  set +f
  for file in "$1"/dev/nvidia[0-9]*; do case ${file##*nvidia} in *[!0-9]*) ;; *) n=$((n + 1)) ;; esac done
  [ "$n" = 0 ] || { _ezpz_visible "$n" CUDA_VISIBLE_DEVICES && return 0 || return 1; }
  if [ -e "$1/dev/kfd" ]; then
    n=$(command cat "$1"/sys/class/kfd/kfd/topology/nodes/*/properties 2>/dev/null | command awk '$1 == "simd_count" && $2 > 0 { n++ } END { print n + 0 }')
    file=${HIP_VISIBLE_DEVICES+HIP}
    [ "$n" = 0 ] || { n=$(_ezpz_visible "$n" ROCR_VISIBLE_DEVICES) && _ezpz_visible "$n" "${file:-CUDA}_VISIBLE_DEVICES" && return 0 || return 1; }
  fi
  for file in "$1"/sys/class/drm/renderD*; do # Intel's cards, but not the graphics inside a CPU
    [ -e "$1/dev/dri/${file##*/}" ] && command grep -qi '^PCI_ID=8086:' "$file/device/uevent" &&
      command grep -q '^PCI_CLASS=3.....*' "$file/device/uevent" && ! command grep -q '^PCI_SLOT_NAME=0000:00:02[.]' "$file/device/uevent" || continue
    set -- "$1" "$file"/device/tile[0-9]*
    [ -e "$2" ] || set -- "$1" "$file"/device/drm/card*/gt/gt[0-9]*
    [ -e "${2-}" ] && [ "${ZE_FLAT_DEVICE_HIERARCHY-}" != COMPOSITE ] && n=$((n + $# - 1)) || n=$((n + 1))
  done
  [ "$n" = 0 ] || { _ezpz_visible "$n" ZE_AFFINITY_MASK && return 0 || return 1; }
  [ "$(command uname -sm)" != 'Darwin arm64' ] || { printf '1\n' && return 0; }
  for file in CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES; do
    n=$(_ezpz_visible 999999 "$file") || return 1
    [ "$n" != 0 ] || { printf '0\n' && return 0; }
  done
}
# How many of $1 devices the variable $2 leaves.
_ezpz_visible() {
  local list
  eval "list=\${$2-} && set -- \"\$@\" \${$2+set}"
  [ -n "${3-}" ] && case $2$list in ZE_AFFINITY_MASK | ZE_AFFINITY_MASKdefault) false ;; esac || { printf '%s\n' "$1" && return 0; }
  printf '%s\n' "$list" | command awk -F, -v n="$1" -v mask="${2%%_*}" '{ for (i = 1; i <= NF; i++) { x = $i; gsub(/[ \t]/, "", x)
    if (mask == "ZE") { if (x !~ /^[0-9]+([.][0-9]+)*$/) bad = 1; else if (int(x) < n && !(int(x) in seen)) { seen[int(x)]; k++ } continue }
    if (x !~ /^([0-9]+$|GPU-|MIG-)/) break
    if (x in seen) bad = 1
    if (x !~ /^MIG-/ && n <= (x ~ /^[0-9]+$/ ? x + 0 : k + 0)) break
    seen[x]; k++; if (x ~ /^MIG-/) mig = 1 } } END { print (mig && k > 1) ? 1 : k + 0; exit bad }' ||
    _ezpz_error "$2=$list; expected devices, each once, such as 0,1,2: correct or unset it"
}

_ezpz_job_facts() (
  _ezpz_plain
  job=${SLURM_JOB_ID:-${PBS_JOBID:-none}}
  [ "${EZPZ_JOB:-$job}" = "$job" ] || unset EZPZ_SCHEDULER EZPZ_NODES EZPZ_GPUS_PER_NODE EZPZ_HOSTFILE
  scheduler=$(ezpz_get_scheduler_type) && nodes=${EZPZ_NODES:-$(ezpz_get_num_nodes)} && devices=${EZPZ_GPUS_PER_NODE:-$(ezpz_get_gpus_per_node)} || return 1
  printf '%s\n' "EZPZ_JOB=$job" "EZPZ_SCHEDULER=${EZPZ_SCHEDULER:-$scheduler}" "EZPZ_NODES=$nodes" "EZPZ_GPUS_PER_NODE=$devices"
  [ "$job" = none ] || { file=${EZPZ_HOSTFILE:-$(ezpz_write_hostfile)} && printf '%s\n' "EZPZ_HOSTFILE=$file"; }
)

_ezpz_proxy_facts() (
  _ezpz_plain
  machine=$(ezpz_get_machine_name) || return 1
  _ezpz_facts "$machine"
  # Login nodes have a network of their own.
  [ -n "${SLURM_JOB_ID-}${PBS_JOBID-}" ] || proxy=''
  url=${1:-$proxy}
  case $url in
    '') return 0 ;;
    http://?* | https://?* | socks*://?*) ;;
    *) _ezpz_error "$url is no proxy; expected its URL, such as http://proxy.example.org:3128" || return 1 ;;
  esac
  for name in http_proxy:HTTP_PROXY https_proxy:HTTPS_PROXY no_proxy:NO_PROXY; do
    [ "$name" != no_proxy:NO_PROXY ] || url=localhost,127.0.0.1,::1${suffix:+,$suffix}
    # The one that is set is the other's, too.
    eval "url_here=\${${name%:*}-\${${name#*:}-\$url}}; set -- \${${name%:*}+set} && [ \$# = 1 ] || printf '%s\n' \"${name%:*}=\$url_here\"
      set -- \${${name#*:}+set} && [ \$# = 1 ] || printf '%s\n' \"${name#*:}=\$url_here\""
  done
)

# The lines of standard input, or without any of the environment, whose variables are saved: those of the job, not
# of a rank or of a step in it, and those of modules and environments.
_ezpz_saved() {
  command awk 'function kept(n) {
      return n ~ /^[A-Za-z0-9_]+$/ && n !~ /^(SLURM_(STEP|PROCID|LOCALID|NODEID|GTIDS|TASK_PID|SRUN)|PBS_JOBCOOKIE|EZPZ_(RANK|LOCAL_|WORLD_SIZE|NODE_RANK|NUM_NODES|JOB_ID|LAUNCH|CONTROL|SPAWN))/ &&
        n ~ /^((PBS|SLURM|EZPZ|MASTER|LMOD|CONDA|CCL|FI|NCCL|ZE|MPICH|CUDA|ROCM)_.*|__LMOD.*|_ModuleTable.*|MODULE.*|LOADEDMODULES|_LMFILES_|VIRTUAL_ENV|(LD_LIBRARY_|LIBRARY_|PYTHON|C|MAN)?PATH|(http|https|no)_proxy|(HTTP|HTTPS|NO)_PROXY)$/ }
    { n = $0; sub(/=.*/, "", n); if (/=/ && kept(n)) print }
    END { if (!NR) for (n in ENVIRON) if (kept(n)) { v = ENVIRON[n]; gsub(/~/, "~t", v); gsub(/\n/, "~n", v); print n "=" v } }'
}
_ezpz_load_facts() (
  _ezpz_plain
  file=${1-}
  if [ -z "$file" ]; then
    folder=$(_ezpz_folder) || return 1
    file=$(command ls -t "$folder" | command grep '^env-' | command head -n 1)
    [ -n "$file" ] || _ezpz_error "no env-* in $folder; expected a saved environment: call ezpz_save_env in the job" || return 1
    file=$folder/$file
  fi
  [ -f "$file" ] && [ -r "$file" ] || _ezpz_error "$file cannot be read; expected a file of ezpz_save_env" || return 1
  [ -O "$file" ] && [ -z "$(command find -H "$file" -prune \( -perm -020 -o -perm -002 \))" ] ||
    _ezpz_error "$file is another user's, or others may write to it; expected one of yours with mode 600: save it again" || return 1
  _ezpz_say "variables of $file"
  _ezpz_saved <"$file"
)

_ezpz_folder() {
  local folder
  for folder in "${HOME:-/nowhere}/.ezpz" "${TMPDIR:-/tmp}/ezpz-$(command id -u)"; do
    command mkdir -p -m 700 "$folder" 2>/dev/null
    [ -d "$folder" ] && [ -O "$folder" ] && [ -w "$folder" ] && printf '%s\n' "$folder" && return 0
  done
  _ezpz_error "${HOME-}/.ezpz and ${TMPDIR:-/tmp} cannot be written; expected a place for a small file: name one, or set TMPDIR"
}
# The path $1, made absolute, or of a file $2-JOBID in our folder.
_ezpz_file() {
  case $1 in
    /*) printf '%s\n' "$1" ;;
    ?*) printf '%s\n' "$PWD/$1" ;;
    *) folder=$(_ezpz_folder) && printf '%s\n' "$folder/$2-$(printf %s "${SLURM_JOB_ID:-${PBS_JOBID:-local}}" | command tr -c 'A-Za-z0-9.-' _)" ;;
  esac
}
_ezpz_put() { # a file that is seen whole or not at all
  { { [ ! -e "$1" ] || [ -f "$1" ]; } && printf '%s\n' "$2" >"$1.$$" && command mv -f "$1.$$" "$1"; } 2>/dev/null ||
    _ezpz_error "$1 cannot be written; expected a file in a folder of yours: name another"
}

_ezpz_load_modules() {
  local machine scheduler hosts signs folders wanted conda devices suffix proxy domain name was=$PATH venv=${VIRTUAL_ENV-} prefix=${CONDA_PREFIX-} code=0
  machine=$(ezpz_get_machine_name) || return 1
  _ezpz_facts "$machine"
  wanted=${EZPZ_MODULES-$wanted}
  [ -n "$wanted" ] || return 0
  command -v module >/dev/null 2>&1 ||
    _ezpz_error "no command 'module' in this shell, and $machine needs: $wanted. Remedy: a login shell (bash -l), . \$MODULESHOME/init/bash, or EZPZ_MODULES= for none" || return 1
  [ -n "${MODULEPATH-}" ] ||
    _ezpz_error "MODULEPATH is empty, so 'module load $wanted' would do nothing; expected the site's folders: start a login shell, or EZPZ_MODULES= for none" || return 1
  for name in $folders; do
    case :$MODULEPATH: in *":$name:"*) continue ;; esac
    module use "$name" >&2 && _ezpz_note_did "use $name"
  done
  for name in $wanted; do
    ! _ezpz_is_loaded "$name" || continue
    module load "$name" >&2 && _ezpz_is_loaded "$name" && _ezpz_note_did "load $name" && continue
    _ezpz_error "module load $name failed on $machine (loaded: ${LOADEDMODULES:-none}): see above, and module avail $name; or name others in EZPZ_MODULES"
    code=1 && break
  done
  case $code$prefix" $wanted " in 0*" conda "* | 0*" conda/"*)
    if [ -n "$conda" ] && [ -z "$prefix" ]; then
      { command -v conda >/dev/null 2>&1 && conda activate "$conda" >&2 && _ezpz_note_did "conda $conda"; } ||
        _ezpz_error "conda activate $conda failed after module load $wanted: see above, and module show $wanted" || code=1
    fi
    ;;
  esac
  # What was active stays so, whatever a module put in its place.
  [ -z "$prefix" ] || _ezpz_keep CONDA_PREFIX "$prefix"
  [ -z "$venv" ] || _ezpz_keep VIRTUAL_ENV "$venv"
  return "$code"
}
_ezpz_is_loaded() { case :${LOADEDMODULES-}: in *":$1:"* | *":$1/"*) ;; *) return 1 ;; esac }
_ezpz_keep() {
  case :$was: in *":$2/bin:"*) ;; *) return 0 ;; esac
  case :$PATH: in
    ":$2/bin:"*) ;;
    *":$2/bin:"*) case :$was: in ":$2/bin:"*) ;; *) false ;; esac ;;
    *) ;;
  esac || return 0
  case :$PATH: in ":$2/bin:"*) ;; *)
    _ezpz_warn "a module took $2/bin, which is active, from the front of PATH: put back"
    _ezpz_first "$2/bin"
    ;;
  esac
  export "$1=$2"
}
_ezpz_undo() {
  case $1 in
    use) module unuse "$2" >&2 ;;
    load) module unload "$2" >&2 ;;
    conda) conda deactivate >&2 ;;
    venv)
      if [ "${VIRTUAL_ENV-}" != "$2" ]; then
        return 0
      elif command -v deactivate >/dev/null 2>&1; then
        deactivate
      else
        _ezpz_first "$2/bin" && export PATH="${PATH#*:}" && unset VIRTUAL_ENV
      fi
      ;;
  esac || _ezpz_error "cannot undo: $*"
}

# The clone's folder.
_ezpz_root() {
  local root
  root=$(CDPATH='' builtin cd -P -- "$(command dirname -- "$(_ezpz_self)")" 2>/dev/null && builtin pwd -P)
  { [ -f "$root/constraints.txt" ] && [ -f "$root/packages/ezpz-suite/pyproject.toml" ] && printf '%s\n' "$root"; } ||
    _ezpz_error "no packages/ and constraints.txt beside $(_ezpz_self): source the utils.sh of a whole clone, or set EZPZ_ROOT to it" || return 2
}
_ezpz_python() {
  local root machine venv
  root=$(_ezpz_root) || return $?
  machine=$(ezpz_get_machine_name) || return 1
  venv=$(
    for name in EZPZ_VENV EZPZ_PYTHON EZPZ_SITE_PACKAGES EZPZ_WHEELS EZPZ_LOG_LEVEL; do eval "export $name=\"\${$name-}\""; done
    BASH_ENV='' command bash "$root/scripts/environment" "$root" "$machine" "$@"
  ) || return 1
  _ezpz_activate "$venv"
}
_ezpz_report() { _ezpz_say "$(command cat "$VIRTUAL_ENV/.ezpz/summary"), environment $VIRTUAL_ENV, $(($(command date +%s) - $1)) s"; }

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
  if [ -f "$file" ]; then
    eval "_ezpz_self() { printf '%s\\n' $(printf '%q' "$file"); }"
  else
    _ezpz_self() { printf '%s\n' "${EZPZ_ROOT:-$PWD}/utils.sh"; }
  fi
}

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
