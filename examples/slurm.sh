#!/bin/sh
# Trains on several machines of a SLURM cluster: sbatch --nodes 4 examples/slurm.sh train.tsv.gz runs/1
# The folder of the run is one that all machines see. A run that is interrupted goes on when this is
# submitted again, with any number of machines.
#SBATCH --job-name hotbed
#SBATCH --ntasks-per-node 1
#SBATCH --cpus-per-task 32
#SBATCH --requeue
set -eu

data=$1
run=$2
processes=${PROCESSES_PER_NODE:-8}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / processes))

srun torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$processes" --max-restarts 3 \
  --rdzv-backend c10d --rdzv-endpoint "$first:29500" --rdzv-id "$SLURM_JOB_ID" \
  -m hotbed train --data "$data" --checkpoint "$run" --resume
