#!/bin/bash
# sbatch slurm.sh folder --data.root photos              one node, with the GPUs requested below
# sbatch --nodes 4 --gpus-per-node 8 slurm.sh shapes     options of sbatch override those below
#
# Call it in this folder. Arguments go to train.py; the run folder is runs/slurm-<job>, or --run.dir.
# Shortly before the time limit, and when the job is preempted, the run saves and ends, the job
# returns to the queue under the same number, and the run resumes.
#
#SBATCH --job-name=image-classifier
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# Two minutes before the end, to all processes of srun and not to this shell. USR1, because Slurm
# reports a step that gets TERM as canceled.
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
# A run that --run.fresh started over resumes when the job returns.
[[ ${SLURM_RESTART_COUNT:-0} -gt 0 ]] && arguments+=(--run.no-fresh)

if [[ $SLURM_JOB_NUM_NODES -eq 1 ]]; then
    # Processes on one machine meet in a file; no port is open to the network.
    meeting=$(mktemp -d)
    rendezvous=(--local-addr 127.0.0.1 --rdzv-endpoint "$meeting/rendezvous"
                --rdzv-conf store_type=file)
else
    # Anyone who reaches this port can run code here: use several nodes on a private network only.
    # Read all names: `head` would sometimes end scontrol by SIGPIPE, and with it this script.
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    rendezvous=(--rdzv-endpoint "${nodes[0]}:$((20000 + SLURM_JOB_ID % 10000))")
fi

# srun does not inherit this from sbatch.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}

# A signal reaches all processes of a step at once. Those of training agree on a step and save;
# torchrun ignores the signal, as it would signal them again and then kill them.
# shellcheck disable=SC2016 # for the shell on the node
in_silence='trap "" TERM USR1; exec "$@"'

# torchrun does not restart: it would take an interrupted run for a failed one. A node that is done
# waits up to 2 minutes for one that still saves.
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

# Requeue only a run that made progress, or a stuck job would return forever. `scancel` ends this
# shell too, so a canceled job does not return.
now=$(cat "$status" 2>/dev/null) || true
if [[ $now == *'"state": "interrupted"'* && $now != "$before" ]]; then
    echo "interrupted and saved: job $SLURM_JOB_ID goes back to the queue"
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$code"
