#!/bin/sh
# rank_shim.sh: what every rank of ezpz-launch starts with. Exports torchrun's variables
# and the EZPZ_* stamp from the launcher's own, runs the user's command, and reports how
# it ended.
#
# usage: sh rank_shim.sh FAMILY RANK SIZE LOCAL_RANK LOCAL_SIZE (--|--escaped) COMMAND [ARG...]
#   FAMILY       the launcher, in ezpz_topo's words
#   RANK...      names of the variables in which that launcher tells them
#   --escaped    every word of the command carries a leading "+"
# environment: EZPZ_STATUS_FILE  where to report, one line at a time; not reported if absent
# exit status: the command's own, 128 + signal; 2 when the launcher told us no rank
#
# It does not exec the command: mpiexec ORs the ranks' exit statuses (1 and 6 give 7) and
# waits for the others, so only this process can tell which rank failed first, and how.

ezpz_family=$1
for ezpz_name in "$2" "$3" "$4" "$5"; do
  eval "ezpz_value=\${$ezpz_name-}"
  if [ -z "$ezpz_value" ]; then
    echo "ezpz-launch: $ezpz_family set no $ezpz_name for this rank; expected it to; is this mpiexec the one that ezpz-launch identified?" >&2
    exit 2
  fi
done

# torchrun's mark would outrank us in ezpz_topo; here it can only be a leftover.
unset TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE
eval "RANK=\$$2 WORLD_SIZE=\$$3 LOCAL_RANK=\$$4 LOCAL_WORLD_SIZE=\$$5"
NODE_RANK=0 GROUP_RANK=0
EZPZ_LAUNCHER=$ezpz_family
EZPZ_RANK=$RANK EZPZ_WORLD_SIZE=$WORLD_SIZE EZPZ_NODE_RANK=$NODE_RANK
EZPZ_LOCAL_RANK=$LOCAL_RANK EZPZ_LOCAL_WORLD_SIZE=$LOCAL_WORLD_SIZE
export RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK
export EZPZ_LAUNCHER EZPZ_RANK EZPZ_WORLD_SIZE EZPZ_LOCAL_RANK EZPZ_LOCAL_WORLD_SIZE EZPZ_NODE_RANK

ezpz_form=$6
shift 6
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
