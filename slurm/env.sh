# The environment of every job of this folder, in one place. What another site may want otherwise is marked SITE.
#
#   what                        where from                                              otherwise
#   hpcdl, python               the virtual environment you submit from, or ./.venv     HPCDL_VENV=PATH sbatch ...
#   srun's flavour of MPI       the MPI library that mpi4py loads                       HPCDL_SRUN_MPI=NAME sbatch ...
#   threads per rank            --cpus-per-task, else one
#   cores of a rank             bound by Slurm, where it has a plugin for that
#   compiled kernels            kept on each node                                       NUMBA_CACHE_DIR below

# SITE: modules, the same with which mpi4py was built (make install MPI=site); they come before the virtual environment.
# module purge
# module load python/3.12 openmpi/5.0

# SITE: the virtual environment; all nodes have to see it under this path.
if [ -n "${HPCDL_VENV:-}" ] && [ ! -x "$HPCDL_VENV/bin/hpcdl" ]; then
  echo "HPCDL_VENV=$HPCDL_VENV: there is no bin/hpcdl in that folder; give the one hpcdl is installed in" >&2
  return 2
fi
for venv in "${HPCDL_VENV:-}" "${VIRTUAL_ENV:-}" "${SLURM_SUBMIT_DIR:-.}/.venv"; do
  if [ -n "$venv" ] && [ -x "$venv/bin/hpcdl" ]; then
    export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH
    break
  fi
done
if ! command -v hpcdl > /dev/null; then
  echo "there is no hpcdl on the PATH; submit from its virtual environment, or with HPCDL_VENV=PATH sbatch ..." >&2
  return 2
fi

# One thread per core that Slurm gave the rank; srun does not take --cpus-per-task from sbatch by itself (since 22.05).
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
export OMP_NUM_THREADS=$SRUN_CPUS_PER_TASK OPENBLAS_NUM_THREADS=$SRUN_CPUS_PER_TASK
export MKL_NUM_THREADS=$SRUN_CPUS_PER_TASK NUMBA_NUM_THREADS=$SRUN_CPUS_PER_TASK

# When a rank is killed (out of memory, say), the others may wait for it for ever; Slurm ends them after these seconds.
export SLURM_WAIT=${SLURM_WAIT:-120}

# SITE: a folder that each node has for itself. It holds compiled code, so nobody else may write there (see below).
export NUMBA_CACHE_DIR=${TMPDIR:-/tmp}/hpcdl-cache-$(id -u)

# SITE: the network, where MPI picks the wrong one.
# export OMPI_MCA_btl_tcp_if_include=ib0 UCX_NET_DEVICES=mlx5_0:1 FI_PROVIDER=tcp

# Under the wrong flavour every rank is a world of its own. Which one is right, the library says without being started.
if [ -z "${HPCDL_SRUN_MPI:-}" ]; then
  library=$(python -c 'import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI
print(MPI.Get_library_version().splitlines()[0].strip("\0"))') || return 2
  case $library in
    *"Open MPI"*) HPCDL_SRUN_MPI=pmix ;;
    *CRAY*) HPCDL_SRUN_MPI=cray_shasta ;;
    *MPICH* | *Intel* | *MVAPICH*) HPCDL_SRUN_MPI=pmi2 ;;  # SITE: pmix, if yours was built with it
    *)
      echo "no flavour of srun is known for $library; submit with HPCDL_SRUN_MPI=NAME (srun --mpi=list)" >&2
      return 2
      ;;
  esac
fi
flavours=$(srun --mpi=list 2>&1)
if ! grep -qw -- "$HPCDL_SRUN_MPI" <<< "$flavours"; then
  flavours=${flavours//$'\n'/ }
  echo "this Slurm has no srun --mpi=$HPCDL_SRUN_MPI, which ${library:-HPCDL_SRUN_MPI} asks for. $flavours" >&2
  return 2
fi
export SLURM_MPI_TYPE=$HPCDL_SRUN_MPI  # what every srun takes from now on
export SLURM_EXPORT_ENV=ALL            # its ranks get this environment, also after sbatch --export=NONE

# Slurm counts the steps of a job from 0 again when it is requeued. What a lost node or killed ranks have left under
# the number of a step (sockets of PMIx in Slurm's own folder, memory of MPICH) can end the new step of that number:
# each try takes other numbers.
for ((try = 8 * ${SLURM_RESTART_COUNT:-0}; try > 0; try--)); do srun --mpi=none --nodes=1 --ntasks=1 true; done

# Once on each node: our own cache folder, and /dev/shm without what killed ranks of ours have left there.
srun --mpi=none --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 bash -c '
  mkdir -p -m 700 "$NUMBA_CACHE_DIR" && [ -O "$NUMBA_CACHE_DIR" ] ||
    { echo "$(hostname): $NUMBA_CACHE_DIR is not ours; set NUMBA_CACHE_DIR in slurm/env.sh" >&2; exit 2; }
  used=$(cat /proc/[0-9]*/maps 2> /dev/null)
  for file in /dev/shm/mpich_shm_* /dev/shm/sm_segment.*; do
    [ ! -O "$file" ] || grep -qF "$file" <<< "$used" || rm -f "$file"
  done' || return 2

# SITE: pinning. No OMP_PROC_BIND here: where Slurm binds nothing, it would put the threads of all ranks on core 0.
if scontrol show config | grep -q '^TaskPlugin .*\(affinity\|cgroup\)'; then export SLURM_CPU_BIND=cores; fi
