#!/bin/bash -l
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --time=2:00:00
#SBATCH --partition=prod
#SBATCH --account=project
#SBATCH --output=train.o%j
#SBATCH --requeue --open-mode=append
#SBATCH --network=disable_rdzv_get
module load rocm
source /env/bin/activate
cd /project || exit
export EZPZ_STATE_DIR=/project/state
EZPZ_CHAIN=/project/state/jobs/train-ID.json \
exec ezpz-launch --machine frontier --signal-before 5m python train.py --lr 1e-4
