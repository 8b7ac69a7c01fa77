#!/bin/bash
# sbatch slurm.sh cifar10 --optim.lr 0.3                  one node, all of its GPUs that are asked for
# sbatch --nodes 4 --gpus-per-node 8 slurm.sh cifar10     any option here can be given there too
#
# To be called from this folder. Arguments go to train.py; the run folder is runs/slurm-<job>, or
# what --run.dir says. When time is nearly up, or the job is preempted, the run saves and ends, the
# job goes back to the queue under its number, and there the run goes on.
#
#SBATCH --job-name=image-classifier
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# Two minutes before the end, to all processes that srun started and not to this shell. USR1, as
# Slurm takes a TERM for the end of a step and says that it was cancelled.
#SBATCH --signal=USR1@120
set -euo pipefail

if [[ ! -f train.py ]]; then
    echo 'error: there is no train.py here: call sbatch in the folder that has it' >&2
    exit 2
fi
python=${PYTHON:-.venv/bin/python}

run_dir=runs/slurm-$SLURM_JOB_ID
previous=
for argument in "$@"; do
    [[ $previous == --run.dir ]] && run_dir=$argument
    [[ $argument == --run.dir=* ]] && run_dir=${argument#*=}
    previous=$argument
done
arguments=("$@" --run.dir "$run_dir")
# What began anew with --run.fresh goes on when it comes back.
[[ ${SLURM_RESTART_COUNT:-0} -gt 0 ]] && arguments+=(--run.no-fresh)

if [[ $SLURM_JOB_NUM_NODES -eq 1 ]]; then
    # Processes of one machine meet in a file, and no port is open to the network.
    meeting=$(mktemp -d)
    rendezvous=(--local-addr 127.0.0.1 --rdzv-endpoint "$meeting/rendezvous"
                --rdzv-conf store_type=file)
else
    # Whoever reaches this port can run code here: several nodes, on a private network only.
    # All names are read: `head` would now and then end scontrol by SIGPIPE, and so this script.
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    rendezvous=(--rdzv-endpoint "${nodes[0]}:$((20000 + SLURM_JOB_ID % 10000))")
fi

# srun does not take this from sbatch by itself.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}

# A signal reaches all processes of a step at once, those of training too. They agree on a step and
# save; torchrun, which would signal them once more and then stop them, is not to hear of it.
# shellcheck disable=SC2016 # for the shell on the node
in_silence='trap "" TERM USR1; exec "$@"'

# No restart by torchrun: it would take an interrupted run for a failed one. A node that is done
# waits for one that still saves, but not for ever.
status=$run_dir/status.json
before=$(cat "$status" 2>/dev/null) || true
code=0
srun --kill-on-bad-exit=0 --wait=120 bash -c "$in_silence" bash \
    "$python" -m torch.distributed.run \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" "${rendezvous[@]}" \
    --max-restarts 0 --signals-to-handle SIGINT \
    train.py "${arguments[@]}" || code=$?
rm -rf "${meeting:-}"

# Interrupted, and further than it was before: else a job without progress would return for ever.
# After `scancel` this shell is no more, so what is cancelled stays so.
now=$(cat "$status" 2>/dev/null) || true
if [[ $now == *'"state": "interrupted"'* && $now != "$before" ]]; then
    echo "interrupted and saved: job $SLURM_JOB_ID goes back to the queue"
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$code"
