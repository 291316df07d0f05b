#!/bin/sh
# pbs_rsh.sh: what Hydra starts its proxy on another node of a PBS job with, in rsh's stead.
#
# usage: pbs_rsh.sh [-OPTION]... HOST WORD...   the words are quoted for a shell, as for rsh
# environment: EZPZ_PBS_TMRSH  PBS's own program that starts a task of the job, without a shell
while [ "${1#-}" != "${1-}" ]; do shift; done
ezpz_host=$1
shift
# Hydra's own, which rsh and ssh would close: where mpiexec is gone, a proxy that comes late could
# still connect to its socket, and would wait for ever.
exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-
exec "$EZPZ_PBS_TMRSH" "$ezpz_host" /bin/sh -c "$*"
