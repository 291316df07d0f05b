#!/bin/sh
# rank_shim.sh: what every rank of ezpz-launch starts with. It exports torchrun's variables and the
# EZPZ_* stamp, made from the launcher's own variables, and becomes the user's command; under
# ezpz-launch it becomes rank_main.py, which runs the command and reports how it ended.
#
# usage: sh rank_shim.sh FAMILY NPROC PPN RANK SIZE LOCAL_RANK (--|--escaped) COMMAND [ARG...]
#   FAMILY       the launcher, in ezpz_topo's words
#   NPROC, PPN   the plan: ranks in all, and of a full host; hosts are filled in rank order
#   RANK...      names of the variables in which that launcher tells them; SIZE may be -, for one
#                that tells no size
#   --escaped    every word of the command carries a leading "+"
# environment: EZPZ_CONTROL  what ezpz-launch hands to rank_main.py; its first line is python=PATH
#              EZPZ_CONTROL_1, EZPZ_CONTROL_2 ...  variables that sh would not pass on: NAME=VALUE
# exit status: the command's own; 2 when the launcher told us no rank, or another place than planned

# bash takes an exported SHELLOPTS: with errexit a failed test would end this script.
set +eux
# Hydra and Open MPI bring a pipe, whose end never comes.
exec </dev/null

# Who is this rank?
ezpz_family=$1
ezpz_nproc=$2
ezpz_ppn=$3
for ezpz_name in "$4" "$5" "$6"; do
  [ "$ezpz_name" != - ] || continue
  eval "ezpz_value=\${$ezpz_name-}"
  if [ -z "$ezpz_value" ]; then
    echo "ezpz-launch: $ezpz_family set no $ezpz_name for this rank; expected it to; is this launcher the one that ezpz-launch identified?" >&2
    exit 2
  fi
done
ezpz_rank=''
ezpz_local=''
eval "ezpz_rank=\$$4"
eval "ezpz_local=\$$6"
ezpz_size=$ezpz_nproc
[ "$5" = - ] || eval "ezpz_size=\$$5"
case $ezpz_rank,$ezpz_local in
  *[!0-9,]*)
    ezpz_size="$ezpz_size (local rank $ezpz_local)"
    ezpz_local=-1
    ezpz_rank=0
    ;;
esac
ezpz_node=$((ezpz_rank / ezpz_ppn))
if [ "$ezpz_rank" -ge "$ezpz_nproc" ] || [ "$ezpz_size" != "$ezpz_nproc" ] || [ "$ezpz_local" -ne $((ezpz_rank % ezpz_ppn)) ]; then
  echo "ezpz-launch: $ezpz_family started rank $ezpz_rank of $ezpz_size as local rank $ezpz_local; expected $ezpz_nproc ranks, $ezpz_ppn a host, in order; what --launcher-args or the environment ask for contradicts the plan" >&2
  exit 2
fi

# Variables of an outer launch, or left over in the user's shell. torchrun's mark would outrank us
# in ezpz_topo.
if [ "$ezpz_family" != torchrun ]; then
  unset TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE
fi
unset LOCAL_SIZE # DeepSpeed's
unset EZPZ_JOB_ID EZPZ_PROGRESS_FILE EZPZ_CAUSE_FILE EZPZ_RUN_FILE EZPZ_LAST_FAULT

export RANK="$ezpz_rank"
export WORLD_SIZE="$ezpz_nproc"
export LOCAL_RANK="$ezpz_local"
export LOCAL_WORLD_SIZE="$ezpz_ppn"
# The last host may have fewer.
if [ $((ezpz_nproc - ezpz_node * ezpz_ppn)) -lt "$ezpz_ppn" ]; then
  LOCAL_WORLD_SIZE=$((ezpz_nproc - ezpz_node * ezpz_ppn))
fi
export NODE_RANK="$ezpz_node"
export GROUP_RANK="$ezpz_node"
export EZPZ_LAUNCHER="$ezpz_family"
export EZPZ_RANK="$RANK"
export EZPZ_WORLD_SIZE="$WORLD_SIZE"
export EZPZ_LOCAL_RANK="$LOCAL_RANK"
export EZPZ_LOCAL_WORLD_SIZE="$LOCAL_WORLD_SIZE"
export EZPZ_NODE_RANK="$NODE_RANK"
export EZPZ_NUM_NODES="$(((ezpz_nproc + ezpz_ppn - 1) / ezpz_ppn))"
export EZPZ_LOCAL_DEVICE="$LOCAL_RANK"
# A rank that dies of SIGSEGV, or is asked by SIGABRT where it hangs, says so.
export PYTHONFAULTHANDLER="${PYTHONFAULTHANDLER-1}"

# The command: as it was, or behind rank_main.py.
ezpz_form=$7
shift 7
if [ "$ezpz_form" = --escaped ]; then
  for ezpz_word; do
    set -- "$@" "${ezpz_word#+}"
    shift
  done
fi
if [ -n "${EZPZ_CONTROL-}" ]; then
  ezpz_python=${EZPZ_CONTROL#python=}
  ezpz_python=${ezpz_python%%"
"*}
  set -- "$ezpz_python" -I -S "${0%/*}/rank_main.py" "$@"
else
  unset EZPZ_CONTROL
fi

# What sh does not pass on, env does.
if [ -n "${EZPZ_CONTROL_1-}" ]; then
  # env would set a variable where the program's path holds "=".
  case $1 in *=*) set -- nice -n 0 "$@" ;; esac
  ezpz_number=1
  while eval "ezpz_value=\${EZPZ_CONTROL_$ezpz_number-}" && [ -n "$ezpz_value" ]; do
    set -- "$ezpz_value" "$@"
    unset "EZPZ_CONTROL_$ezpz_number"
    ezpz_number=$((ezpz_number + 1))
  done
  set -- /usr/bin/env "$@"
fi
# A program of that name, never this shell's own echo or test.
exec "$@"
