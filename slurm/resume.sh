# Training that outlives the time limit of its job: signal, checkpoint, status 85, requeue, resume. After env.sh.
#
#   Slurm                          this shell                     ranks
#   USR1, --signal seconds early   passes it on              ->   finish the step, save, exit with 85 (docs/runs.md)
#   puts the job back in line  <-  scontrol requeue
#   starts it again, same number   train ... --resume DIR    ->   go on, with the same bits
#
# Preemption ends in the same way: Slurm sends the ranks SIGTERM. After the loss of a node Slurm requeues the job, which
# goes on from the last checkpoint of --checkpoint-every. Where a rank dies, `hpcdl supervise` goes on from there within
# the job, HPCDL_RESTARTS times at most (3).

task=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
task=${task:-$SLURM_JOB_ID}  # by this name, a member of an array is requeued without the others
warned=0 step=''
trap 'warned=$((warned + 1)); [ -z "$step" ] || kill -USR1 "$step"' USR1

# start COMMAND...: run it on all ranks.
start() { await srun "$@"; }

# keep COMMAND...: the same; what fails goes on from its last checkpoint, on the same nodes (docs/reliability.md).
keep() { await hpcdl supervise --restarts "${HPCDL_RESTARTS:-3}" -- srun "$@"; }

# await COMMAND...: run it. A signal ends `wait` early; asked once more, it knows the true status.
await() {
  local status heard
  [ $warned = 0 ] || return 85
  "$@" &
  step=$!
  while
    heard=$warned
    wait "$step"
    status=$?
    [ "$heard" != "$warned" ]
  do :; done
  step=''
  return "$status"
}

# train DIR SCRIPT OPTIONS...: run `hpcdl SCRIPT` into DIR, unless --out says otherwise, or go on with what lies there.
train() {
  local dir=$1 word before=''
  shift
  for word; do
    [ "$before" != --out ] || dir=$word
    case $word in --out=*) dir=${word#--out=} ;; esac
    before=$word
  done
  case $1 in
    train[-_]kmeans) start hpcdl "$@"; return ;;  # its --out is a file
    train*) ;;
    *) start hpcdl "$@"; return ;;  # no training: nothing to resume
  esac
  [ "$dir" != none ] || { start hpcdl "$@"; return; }
  local more=(--out "$dir") status
  if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && [ -e "$dir/checkpoint.h5" ]; then
    more+=(--resume "$dir")
    [[ " $* " != *" --trust"* ]] || more+=(--trust "$dir")  # its options repeat the names of a trusted file
  elif [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && [ -e "$dir" ]; then
    mv "$dir" "$dir-try-$SLURM_RESTART_COUNT"  # begun, but nothing was saved: it starts anew
  fi
  keep hpcdl "$@" "${more[@]}"
  status=$?
  if [ $status = 0 ] && [ ! -e "$dir/summary.json" ]; then  # srun has status 0 also where it could launch no rank
    echo "$dir/summary.json was not written: the training has not run" >&2
    status=1
  fi
  return $status
}

# finish STATUS: end the job with this status; after 85, requeue it, unless it was cancelled.
finish() {
  if [ "$1" = 85 ] && [ "$(squeue -h -j "$task" -o %T)" = RUNNING ]; then
    echo "saved; job $task is requeued"
    scontrol requeue "$task" && sleep 60  # Slurm ends this shell
    echo "job $task could not be requeued; go on with --resume" >&2
  fi
  exit "$1"
}
