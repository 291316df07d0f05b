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
# environment: EZPZ_CONTROL  one field a line, "-" where there is none; nothing of this where it is
#              absent: ID    of the launch; reports on standard error are told by it
#                      HOLD  seconds for which a rank that failed waits to be released
#                      AGENT what starts this node's agent (two lines: Python, program)
#                      WHERE host:port ... of ezpz-launch, a secret, and the seconds after which one
#                            of both is lost to the other, for the agent (three lines)
#                      FILES a folder for the output of each rank
#                      PUMP  program that labels or doubles the output, and keeps lines whole
#                      PREFIX --prefix, for it
#                      PORT  a port that must be free on rank 0's host
#                      DEVICES their type (cuda, xpu), how many a node has, and whether each
#                            rank is to see one only (three lines)
#                      ATTEMPT from 0; PROGRESS, the file for it; JOB, the scheduler's id
#                      RUN   a file in which a History says where its own file is
#                      FAULT whose fault the end of the attempt before was, for History's report
#              EZPZ_CONTROL_1, EZPZ_CONTROL_2 ...  variables that sh would not pass on: NAME=VALUE
# exit status: the command's own, 128 + signal; 2 when the launcher told us no rank, or another
#              place than planned
#
# It does not exec the command: mpiexec ORs the ranks' exit statuses (1 and 6 give 7) and
# waits for the others, so only this process can tell which rank failed first, and how.

# bash takes an exported SHELLOPTS: with errexit no failure would be reported.
set +eux
# Hydra and Open MPI bring a pipe, whose end never comes.
exec </dev/null
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

ezpz_form=$7
shift 7
if [ "$ezpz_form" = --escaped ]; then
  for ezpz_word; do
    set -- "$@" "${ezpz_word#+}"
    shift
  done
fi

ezpz_read() {
  ezpz_id=$1 ezpz_hold=$2 ezpz_python=$3 ezpz_agent=$4
  # $5 to $7 are the agent's, which reads them itself.
  ezpz_files=$8
  shift 8
  ezpz_pump=$1 ezpz_prefix=$2 ezpz_port=$3 ezpz_type=$4 ezpz_devices=$5 ezpz_one=$6
  shift 6
  # torchrun's word for it too; scripts read it.
  EZPZ_ATTEMPT=$1 TORCHELASTIC_RESTART_COUNT=$1
  export EZPZ_ATTEMPT TORCHELASTIC_RESTART_COUNT
  [ "$2" = - ] || export EZPZ_PROGRESS_FILE="$2"
  [ "$3" = - ] || export EZPZ_JOB_ID="$3"
  [ "$4" = - ] || export EZPZ_RUN_FILE="$4"
  [ "$5" = - ] || export EZPZ_LAST_FAULT="$5"
}
ezpz_id=- ezpz_files=- ezpz_pump=- ezpz_type=-
unset EZPZ_JOB_ID EZPZ_PROGRESS_FILE EZPZ_CAUSE_FILE EZPZ_RUN_FILE EZPZ_LAST_FAULT
if [ -n "${EZPZ_CONTROL-}" ]; then
  set -f
  ezpz_ifs=$IFS IFS='
'
  # shellcheck disable=SC2086 # one field a line
  ezpz_read $EZPZ_CONTROL
  IFS=$ezpz_ifs
  set +f
  if [ "$ezpz_local" = 0 ] && [ "$ezpz_agent" != - ]; then
    "$ezpz_python" -I -S "$ezpz_agent" "$ezpz_node" </dev/null >/dev/null 2>&1 &
  fi
fi
# Ours alone: a launch inside the command would report to the wrong place.
unset EZPZ_CONTROL

# Twice, as a launcher may cut a stream into pieces, and put another rank's piece between; and each
# word again, to see that. Short, for every rank says it: _output.py knows the letters.
ezpz_report() {
  [ "$ezpz_id" = - ] ||
    printf '\036%s %s|%s\037\n\036%s %s|%s\037\n' "${ezpz_id##*-}" "$*" "$*" "${ezpz_id##*-}" "$*" "$*" >&2
}

# LOCAL_RANK indexes the devices that this rank sees, be they fewer than the ranks here.
ezpz_show_devices() {
  ezpz_name=CUDA_VISIBLE_DEVICES ezpz_list=${CUDA_VISIBLE_DEVICES-}
  if [ "$ezpz_type" = xpu ]; then
    ezpz_name=ZE_AFFINITY_MASK ezpz_list=${ZE_AFFINITY_MASK-}
  elif [ -n "${HIP_VISIBLE_DEVICES-}" ]; then
    # HIP reads CUDA's only where its own is not set, and counts within what ROCR left.
    ezpz_name=HIP_VISIBLE_DEVICES ezpz_list=$HIP_VISIBLE_DEVICES
  elif [ -z "$ezpz_list" ] && [ -n "${ROCR_VISIBLE_DEVICES-}" ]; then
    ezpz_pick_device "$ROCR_VISIBLE_DEVICES"
    ezpz_devices=$ezpz_count
  fi
  # Set and empty, it hides every device: that is the user's word.
  eval "[ -z \"\${$ezpz_name+set}\" ]" || [ -n "$ezpz_list" ] || return 0
  ezpz_device=$((ezpz_local % (ezpz_devices > 0 ? ezpz_devices : 1)))
  [ "$ezpz_devices" = 0 ] || LOCAL_RANK=$ezpz_device
  if [ -n "$ezpz_list" ]; then
    ezpz_pick_device "$ezpz_list"
    LOCAL_RANK=$((ezpz_local % ezpz_count))
  fi
  if [ "$ezpz_one" = 1 ]; then
    eval "export $ezpz_name=\$ezpz_device"
    LOCAL_RANK=0
  fi
}
ezpz_pick_device() {
  ezpz_ifs=$IFS IFS=,
  # shellcheck disable=SC2086 # the list's entries
  set -- $1
  IFS=$ezpz_ifs
  ezpz_count=$#
  shift $((ezpz_local % ezpz_count))
  # shellcheck disable=SC2034 # read by eval
  ezpz_device=$1
}
[ "$ezpz_type" = - ] || ezpz_show_devices

EZPZ_LOCAL_DEVICE=$LOCAL_RANK
if [ "$ezpz_id" != - ]; then
  # By it a launch finds what launches inside its ranks have started.
  [ -z "${EZPZ_LAUNCH_ID-}" ] || export EZPZ_INSIDE="${EZPZ_INSIDE:+$EZPZ_INSIDE:}$EZPZ_LAUNCH_ID"
  EZPZ_LAUNCH_ID=$ezpz_id
  # A rank that leaves because of another writes that one's number there.
  EZPZ_CAUSE_FILE=${TMPDIR:-/tmp}/ezpz-$ezpz_id-$RANK
  export EZPZ_LAUNCH_ID EZPZ_CAUSE_FILE
fi
export RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK
export EZPZ_LAUNCHER EZPZ_RANK EZPZ_WORLD_SIZE EZPZ_LOCAL_RANK EZPZ_LOCAL_WORLD_SIZE
export EZPZ_NODE_RANK EZPZ_NUM_NODES EZPZ_LOCAL_DEVICE
# A rank that dies of SIGSEGV, or is asked by SIGABRT where it hangs, says so.
export PYTHONFAULTHANDLER="${PYTHONFAULTHANDLER-1}"

# The shell says "Killed" or "Terminated" of what it ran; ezpz-launch says it better. So for that time
# our standard error lies on a free file descriptor (Hydra's socket may be any), if there is one.
for ezpz_fd in 3 4 5 6 7 8 9 0; do
  [ -e "/dev/fd/$ezpz_fd" ] || break
done
[ -e /dev/fd/0 ] || ezpz_fd=0 # then nobody can tell
ezpz_back() { [ "$ezpz_fd" = 0 ] || eval "exec 2>&$ezpz_fd $ezpz_fd>&-"; }
ezpz_away() { [ "$ezpz_fd" = 0 ] || eval "exec $ezpz_fd>&2 2>/dev/null"; }
ezpz_close() { [ "$ezpz_fd" = 0 ] || eval "exec $ezpz_fd>&-"; }

# exec in a subshell: the program of that name, never this shell's own echo or test.
ezpz_run() {
  if [ "$ezpz_pump" != - ]; then
    set -- -- "$@"
    [ "$ezpz_files" = - ] || set -- --files "$ezpz_files" "$@"
    [ "$ezpz_prefix" = - ] || set -- --prefix "$@"
    set -- "$ezpz_python" -I -S "$ezpz_pump" "$RANK" "${SLURMD_NODENAME:-$(uname -n)}" "$@"
  fi
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
  if [ "$ezpz_pump" = - ] && [ "$ezpz_files" != - ]; then
    (ezpz_close && exec "$@") >>"$ezpz_files/rank-$RANK.out" 2>>"$ezpz_files/rank-$RANK.err"
  else
    (ezpz_back && exec "$@")
  fi
}

# Whether something listens on the port here. Source: proc_net_tcp of Linux: local_address is hex
# address, colon, hex port; state 0A listens.
ezpz_is_taken() {
  ezpz_hex=$(printf '%04X' "$1")
  for ezpz_table in /proc/net/tcp /proc/net/tcp6; do
    [ -r "$ezpz_table" ] || continue
    while read -r ezpz_name ezpz_value ezpz_name ezpz_form ezpz_name; do
      case $ezpz_value,$ezpz_form in *":$ezpz_hex,0A") return 0 ;; esac
    done <"$ezpz_table"
  done
  return 1
}
if [ "$ezpz_id" != - ] && [ "$RANK" = 0 ] && [ "$ezpz_port" != - ] && ezpz_is_taken "$ezpz_port"; then
  ezpz_report "t 0 $ezpz_port"
fi

# Launchers signal a rank's whole process group: the command gets the signal too, and
# acts on it; we stay to see how it ends. A trap (unlike an ignored signal) is not inherited.
ezpz_told=''
trap 'ezpz_told=130' INT
ezpz_release=''
trap 'ezpz_told=143; eval "$ezpz_release"' TERM
trap 'ezpz_told=129' HUP
trap 'ezpz_told=131' QUIT
trap : USR1 USR2
ezpz_report "s $RANK $$"
# Told to end before there was anything to end.
ezpz_status=$ezpz_told
# On this node the folder may be missing, if it is no shared one. Why a file cannot be made is said
# here; below it would not be heard.
[ "$ezpz_files" = - ] || { mkdir -p "$ezpz_files" && true >>"$ezpz_files/rank-$RANK.out"; } ||
  ezpz_status=${ezpz_status:-2}
if [ -z "$ezpz_status" ]; then
  ezpz_away
  ezpz_run "$@"
  ezpz_status=$?
  ezpz_back
fi
if [ "$ezpz_id" != - ] && [ -f "$EZPZ_CAUSE_FILE" ]; then
  ezpz_value=''
  read -r ezpz_value <"$EZPZ_CAUSE_FILE"
  rm -f "$EZPZ_CAUSE_FILE"
  case $ezpz_value in '' | *[!0-9]*) ;; *) ezpz_report "c $RANK $ezpz_value" ;; esac
fi
ezpz_report "e $RANK $ezpz_status"
if [ "$ezpz_id" != - ] && [ "$ezpz_status" != 0 ]; then
  # Some launchers kill the others as soon as they see a failure: ezpz-launch gives them the time
  # that it promises, then releases us by SIGTERM.
  # A second at a time: whoever kills us may not find the sleep.
  exec 2>/dev/null
  # Not by another trap: while zsh sets one, the signal kills it.
  # shellcheck disable=SC2016 # the trap evaluates it
  ezpz_release='kill "$ezpz_sleep"; exit "$ezpz_status"'
  while [ "$ezpz_hold" -gt 0 ]; do
    sleep 1 >/dev/null &
    ezpz_sleep=$!
    wait "$ezpz_sleep"
    ezpz_hold=$((ezpz_hold - 1))
  done
fi
# Hydra's proxy uses a whole core from when one rank's PMI socket closes until its last rank has
# ended. So that socket stays open in a process of its own, which ends as the proxy does. It is
# bash that can close those file descriptors above 9 that Hydra leaks, and waits for.
if [ "$ezpz_family" = pmi ] && [ -n "${PMI_FD-}" ] && [ "$LOCAL_WORLD_SIZE" -gt 1 ]; then
  (
    trap '' INT TERM HUP QUIT USR1 USR2
    unset EZPZ_LAUNCH_ID EZPZ_INSIDE # it is not for us to end
    # shellcheck disable=SC2016 # bash's own
    exec bash -pc 'for fd in /dev/fd/*; do
      fd=${fd##*/}
      [ "$fd" -le 2 ] || [ "$fd" = "$PMI_FD" ] || eval "exec $fd>&-"
    done
    read -r <&"$PMI_FD"'
  ) </dev/null >/dev/null 2>&1 &
fi
exit "$ezpz_status"
