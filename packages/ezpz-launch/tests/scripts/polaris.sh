#!/bin/bash -l
#PBS -N train
#PBS -l select=4
#PBS -l place=scatter
#PBS -l walltime=2:00:00
#PBS -q prod
#PBS -A project
#PBS -j oe -k doe
#PBS -r y
#PBS -l filesystems=home:eagle
module use /soft/modulefiles
module load conda
conda activate base
source /env/bin/activate
cd /project || exit
export EZPZ_STATE_DIR=/project/state
EZPZ_CHAIN=/project/state/jobs/train-ID.json \
exec ezpz-launch --machine polaris --signal-before 5m python train.py --lr 1e-4
