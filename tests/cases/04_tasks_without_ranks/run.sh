#!/usr/bin/env bash
# srun or mpirun without torchrun: each task trained by itself, into one folder.
. "$(dirname "$0")/../common.sh"
refused log "srun started this as one of several tasks .SLURM_STEP_NUM_TASKS=2" "$(SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1 train log -- --save ck)"
refused log "mpirun started this as one of several tasks .OMPI_COMM_WORLD_SIZE=2" "$(OMPI_COMM_WORLD_SIZE=2 train log -- --save ck)"
