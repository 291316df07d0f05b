#!/bin/sh
# rank_shim.sh: what every rank of ezpz-launch starts with. Exports torchrun's variables
# and the EZPZ_* stamp from the launcher's own, runs the user's command, and reports how
# it ended.
#
# usage: sh rank_shim.sh FAMILY NPROC PPN RANK SIZE LOCAL_RANK (--|--escaped) COMMAND [ARG...]
#   FAMILY       the launcher, in ezpz_topo's words
#   NPROC, PPN   the plan: ranks in all, and of a full host; hosts are filled in rank order
#   RANK...      names of the variables in which that launcher tells them; SIZE may be -, for one
#                that tells no size
#   --escaped    every word of the command carries a leading "+"
# environment: EZPZ_STATUS_FILE  where to report, one line at a time; not reported if absent
# exit status: the command's own, 128 + signal; 2 when the launcher told us no rank, or another
#              place than planned
#
# It does not exec the command: mpiexec ORs the ranks' exit statuses (1 and 6 give 7) and
# waits for the others, so only this process can tell which rank failed first, and how.

ezpz_family=$1 ezpz_nproc=$2 ezpz_ppn=$3
for ezpz_name in "$4" "$5" "$6"; do
  [ "$ezpz_name" != - ] || continue
  eval "ezpz_value=\${$ezpz_name-}"
  if [ -z "$ezpz_value" ]; then
    echo "ezpz-launch: $ezpz_family set no $ezpz_name for this rank; expected it to; is this launcher the one that ezpz-launch identified?" >&2
    exit 2
  fi
done
ezpz_rank='' ezpz_local=''
eval "ezpz_rank=\$$4 ezpz_local=\$$6"
ezpz_size=$ezpz_nproc
[ "$5" = - ] || eval "ezpz_size=\$$5"
case $ezpz_rank,$ezpz_local in
  *[!0-9,]*) ezpz_size="$ezpz_size (local rank $ezpz_local)" ezpz_local=-1 ezpz_rank=0 ;;
esac
ezpz_node=$((ezpz_rank / ezpz_ppn))
if [ "$ezpz_rank" -ge "$ezpz_nproc" ] || [ "$ezpz_size" != "$ezpz_nproc" ] || [ "$ezpz_local" -ne $((ezpz_rank % ezpz_ppn)) ]; then
  echo "ezpz-launch: $ezpz_family started rank $ezpz_rank of $ezpz_size as local rank $ezpz_local; expected $ezpz_nproc ranks, $ezpz_ppn a host, in order; what --launcher-args or the environment ask for contradicts the plan" >&2
  exit 2
fi

# torchrun's mark would outrank us in ezpz_topo; here it can only be a leftover.
[ "$ezpz_family" = torchrun ] ||
  unset TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE
unset LOCAL_SIZE # DeepSpeed's
RANK=$ezpz_rank WORLD_SIZE=$ezpz_nproc LOCAL_RANK=$ezpz_local LOCAL_WORLD_SIZE=$ezpz_ppn
# The last host may have fewer.
[ $((ezpz_nproc - ezpz_node * ezpz_ppn)) -ge "$ezpz_ppn" ] ||
  LOCAL_WORLD_SIZE=$((ezpz_nproc - ezpz_node * ezpz_ppn))
NODE_RANK=$ezpz_node GROUP_RANK=$ezpz_node
EZPZ_LAUNCHER=$ezpz_family
EZPZ_RANK=$RANK EZPZ_WORLD_SIZE=$WORLD_SIZE EZPZ_NODE_RANK=$NODE_RANK
EZPZ_NUM_NODES=$(((ezpz_nproc + ezpz_ppn - 1) / ezpz_ppn))
EZPZ_LOCAL_RANK=$LOCAL_RANK EZPZ_LOCAL_WORLD_SIZE=$LOCAL_WORLD_SIZE
export RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK
export EZPZ_LAUNCHER EZPZ_RANK EZPZ_WORLD_SIZE EZPZ_LOCAL_RANK EZPZ_LOCAL_WORLD_SIZE EZPZ_NODE_RANK EZPZ_NUM_NODES

ezpz_form=$7
shift 7
if [ "$ezpz_form" = --escaped ]; then
  for ezpz_word; do
    set -- "$@" "${ezpz_word#+}"
    shift
  done
fi

# Ours alone: a launch inside the command would report to the wrong place.
ezpz_status_file=${EZPZ_STATUS_FILE-}
unset EZPZ_STATUS_FILE
ezpz_report() {
  [ ! -w "$ezpz_status_file" ] || printf '%s\n' "$*" >>"$ezpz_status_file"
}

# Launchers signal a rank's whole process group: the command gets the signal too, and
# acts on it; we stay to see how it ends. A trap (unlike an ignored signal) is not inherited.
trap : INT TERM HUP QUIT USR1 USR2
ezpz_report "start $RANK $$"
# exec in a subshell: the program of that name, never this shell's own echo or test.
(exec "$@")
ezpz_status=$?
ezpz_report "end $RANK $ezpz_status"
exit "$ezpz_status"
