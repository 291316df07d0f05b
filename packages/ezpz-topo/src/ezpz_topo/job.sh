#!/usr/bin/env bash
# job.sh: the job, for the functions of utils.sh; they find it in the clone or in the environment.
#   usage: job.sh get NAME           a fact that ezpz-topo --shell prints: SCHEDULER, NODES, ...
#          job.sh facts              NAME=value lines for ezpz_setup_job
#          job.sh hostfile [FILE]    write the hosts, print the path
#          job.sh save [FILE]        write the job's environment, print the path
#          job.sh load [FILE]        NAME=value lines of what was saved
#   exit codes: 0, 1 with the reason on stderr. For bash >= 3.2
set -f
IFS=$' \t\n' job=${SLURM_JOB_ID:-${PBS_JOBID:-local}}
error() { printf 'ezpz: error: %s\n' "$*" >&2 && return 1; }

ask() {
  command -v ezpz-topo >/dev/null || error "ezpz-topo, which knows the job, is not on PATH:" \
    "call ezpz_setup_env or ezpz_setup_python first" || return
  facts=$(ezpz-topo --shell) || return 1
  # Of our own names: what the user has set is not overwritten.
  eval "$(printf '%s\n' "$facts" | sed 's/^EZPZ_/TOPO_/')"
}
get() {
  ask || return
  case $1:$TOPO_JOB in
    JOB:none) error "no job: PBS_JOBID and SLURM_JOB_ID are not set; call this in a job" ;;
    *) eval "printf '%s\n' \"\$TOPO_$1\"" ;;
  esac
}
facts() {
  ask || return
  [ "${EZPZ_JOB:-$TOPO_JOB}" = "$TOPO_JOB" ] || # left over from another job (qsub -V)
    unset EZPZ_SCHEDULER EZPZ_NODES EZPZ_GPUS_PER_NODE EZPZ_HOSTFILE
  printf '%s\n' "EZPZ_JOB=$TOPO_JOB" "EZPZ_SCHEDULER=${EZPZ_SCHEDULER:-$TOPO_SCHEDULER}" \
    "EZPZ_NODES=${EZPZ_NODES:-$TOPO_NODES}" \
    "EZPZ_GPUS_PER_NODE=${EZPZ_GPUS_PER_NODE:-$TOPO_GPUS_PER_NODE}"
  [ "$TOPO_JOB" != none ] || return 0
  file=${EZPZ_HOSTFILE:-$(hostfile '')} && printf '%s\n' "EZPZ_HOSTFILE=$file"
}
hostfile() {
  [ -n "${TOPO_HOSTS-}" ] || ask || return
  put "${1:-$(default hosts)}" "$TOPO_HOSTS"
}

# The file is for this user alone: it tells what runs.
save() {
  umask 077
  local file=$1 first here
  if [ -z "$file" ]; then
    file=$(default env) || return
    here=$(uname -n) first=${here%%.*}
    [ ! -r "${PBS_NODEFILE-}" ] || IFS=. read -r first _ <"$PBS_NODEFILE"
    # Another node's shell often has a poorer PATH, and the same home.
    if [ -f "$file" ] && { [ "$first" != "${here%%.*}" ] || [ "${SLURM_NODEID:-0}" != 0 ]; }; then
      printf '%s\n' "$file" && return
    fi
  fi
  put "$file" "$(kept </dev/null)"
}
# It is read, never executed.
load() {
  local file=$1 folder
  if [ -z "$file" ]; then
    folder=$(folder_of_ours) && file=$folder/$(command ls -t "$folder" | command grep -m 1 '^env-') || return
  fi
  { [ -f "$file" ] && grep -q '^PATH=' "$file"; } ||
    error "$file is no saved environment; expected a file of ezpz_save_env: call that in the job" ||
    return
  [ -O "$file" ] && [ -z "$(find -H "$file" -prune \( -perm -020 -o -perm -002 \))" ] ||
    error "$file is not yours alone to write; expected your own, with mode 600: save it again" ||
    return
  case ${EZPZ_LOG_LEVEL-} in [WwEeCc]*) ;; *) printf 'ezpz: variables of %s\n' "$file" >&2 ;; esac
  kept <"$file"
}
# Of standard input, or if it is empty of the environment: the variables of the job, but not those
# of a rank or a step in it, and those of modules and environments. ~n is a line end, ~t a tilde.
kept() {
  awk '
    function of_rank(n) {
      return n ~ /^(SLURM_(STEP|PROCID|LOCALID|NODEID|GTIDS|TASK_PID|SRUN)|PBS_JOBCOOKIE)/ ||
        n ~ /^EZPZ_(RANK|LOCAL_|WORLD_SIZE|NODE_RANK|NUM_NODES|JOB_ID|LAUNCH|CONTROL|SPAWN)/
    }
    function of_job(n) {
      return n ~ /^(PBS|SLURM|EZPZ|MASTER|CCL|FI|NCCL|ZE|MPICH|CUDA|ROCM)_[A-Za-z0-9_]+$/ ||
        n ~ /^((LMOD|CONDA|__LMOD)_|_ModuleTable)[A-Za-z0-9_]+$/ ||
        n ~ /^(MODULE[A-Z]+|LOADEDMODULES|_LMFILES_|VIRTUAL_ENV)$/ ||
        n ~ /^((LD_LIBRARY_|LIBRARY_|PYTHON|C|MAN)?PATH|(http|https|no)_proxy)$/ ||
        n ~ /^(HTTP|HTTPS|NO)_PROXY$/
    }
    { n = $0; sub(/=.*/, "", n); if (/=/ && of_job(n) && !of_rank(n)) print }
    END {
      if (NR) exit
      for (n in ENVIRON) {
        if (!of_job(n) || of_rank(n)) continue
        v = ENVIRON[n]; gsub(/~/, "~t", v); gsub(/\n/, "~n", v); print n "=" v
      }
    }'
}

default() { # KIND: a file of this job in our folder
  local folder
  folder=$(folder_of_ours) && printf '%s\n' "$folder/$1-$(printf %s "$job" | tr -c 'A-Za-z0-9.-' _)"
}
folder_of_ours() {
  local folder
  for folder in "${HOME:-/nowhere}/.ezpz" "${TMPDIR:-/tmp}/ezpz-$(id -u)"; do
    command mkdir -p -m 700 "$folder" 2>/dev/null
    [ -d "$folder" ] && [ -O "$folder" ] && [ -w "$folder" ] && printf '%s\n' "$folder" && return
  done
  error "${HOME-}/.ezpz and ${TMPDIR:-/tmp} cannot be written; name a file, or set TMPDIR"
}
put() { # FILE TEXT: seen whole or not at all
  local file=$1
  [ -n "$file" ] || return
  case $file in /*) ;; *) file=$PWD/$file ;; esac
  { [ ! -e "$file" ] || [ -f "$file" ]; } && printf '%s\n' "$2" 2>/dev/null >"$file.$$" &&
    mv -f "$file.$$" "$file" && printf '%s\n' "$file" && return
  error "$file cannot be written; expected a file in a folder of yours: name another"
}

"$1" "${2-}"
