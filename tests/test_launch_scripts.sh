#!/bin/sh
# scripts/launch: the layouts that they plan, and the command lines that they would start, with launchers that only say
# what they were given. Prints TAP for tests/run.sh. MOK_TRAIN names another build than build/cpu/train.
set -u

. tests/tap.sh
PROGRAM=${MOK_TRAIN:-build/cpu/train}
export PROGRAM
unset RANKS EP HOSTFILE RACKS MPI_TYPE MPIRUN DRY_RUN SLURM_SUBMIT_DIR SLURM_JOB_NUM_NODES
echo "1..11"

cat >"$scratch/srun" <<'END'
#!/bin/sh
case ${0##*/}$1 in
open-mpirun--version) echo "mpirun (Open MPI) 4.1.4" ;;
*) echo "started: ${0##*/} $*" ;;
esac
END
chmod +x "$scratch/srun"
ln -s srun "$scratch/mpirun"
ln -s srun "$scratch/open-mpirun"
PATH=$scratch:$PATH

# launch [NAME=VALUE]... SCRIPT [--flag...]: what it says goes into the report too.
launch() {
    env "$@" >"$scratch/report" 2>&1
    status=$?
    cat "$scratch/report"
    return "$status"
}
says() { grep -q -F -e "$1" "$scratch/report"; }
refuses() {
    launch "$@"
    [ $? = 2 ] && ! says started:
}

plans_a_node() {
    launch DRY_RUN=1 scripts/launch/slurm-node.sh --preset moonlight-mini --seq 128 &&
        says "Memory of one rank of 8, with 8 of 64 experts" && says "would run: srun" && ! says started:
}
plans_a_rack() {
    launch DRY_RUN=1 scripts/launch/slurm-rack.sh && says "Memory of one rank of 72, with 2 of 128 experts" &&
        launch DRY_RUN=1 EP=24 scripts/launch/slurm-rack.sh --preset moonlight-mini --seq 128 &&
        says "Memory of one rank of 72, with 3 of 64 experts" &&
        launch DRY_RUN=1 SLURM_JOB_NUM_NODES=16 scripts/launch/slurm-rack.sh --preset moonlight-mini --seq 128 &&
        says "Memory of one rank of 64, with 1 of 64 experts"
}
plans_racks() {
    launch DRY_RUN=1 scripts/launch/slurm-racks.sh --preset qwen3-moe-mini --seq 128 &&
        says "Memory of one rank of 144, with 2 of 128 experts" &&
        launch DRY_RUN=1 RACKS=4 EP=36 scripts/launch/slurm-racks.sh --preset qwen3-moe-mini --seq 128 &&
        says "Memory of one rank of 288, with 4 of 128 experts"
}
plans_by_mpirun() {
    launch DRY_RUN=1 RANKS=6 EP=3 scripts/launch/mpirun.sh --preset unit-12 &&
        says "Memory of one rank of 6, with 4 of 12 experts" && ! says started:
}

starts_by_srun() {
    words="--gpu-bind=none --distribution=block:block --kill-on-bad-exit=1 $PROGRAM"
    launch SLURM_JOB_NUM_NODES=1 MPI_TYPE=pmi2 scripts/launch/slurm-node.sh --preset unit --out "a b" &&
        says "started: srun --mpi=pmi2 --ntasks-per-node=8 --gpus-per-node=8 $words --ep 8 --preset unit --out a b" &&
        launch SLURM_JOB_NUM_NODES=18 scripts/launch/slurm-rack.sh --resume --out x &&
        says "started: srun --mpi=pmix --ntasks-per-node=4 --gpus-per-node=4 $words --ep 72 --resume --out x" &&
        launch SLURM_JOB_NUM_NODES=36 scripts/launch/slurm-racks.sh --resume && says "$words --ep 72 --resume"
}
starts_by_mpirun() {
    launch RANKS=4 scripts/launch/mpirun.sh --preset unit &&
        says "started: mpirun -n 4 $PROGRAM --ep 0 --preset unit" &&
        launch RANKS=4 EP=2 HOSTFILE=hosts MPIRUN=open-mpirun scripts/launch/mpirun.sh --preset unit &&
        says "started: open-mpirun -n 4 -hostfile hosts --bind-to none $PROGRAM --ep 2 --preset unit" &&
        launch RANKS=2 MPIRUN="open-mpirun --bind-to core" scripts/launch/mpirun.sh --preset unit &&
        says "started: open-mpirun --bind-to core -n 2 $PROGRAM"
}

refuses_layouts_that_do_not_fit() {
    refuses RANKS=6 EP=4 scripts/launch/mpirun.sh && says "found 6 ranks with EP=4" &&
        refuses SLURM_JOB_NUM_NODES=2 scripts/launch/slurm-node.sh && says "found 2 nodes, wanted 1" &&
        refuses SLURM_JOB_NUM_NODES=19 scripts/launch/slurm-rack.sh && says "wanted at most the 18" &&
        refuses SLURM_JOB_NUM_NODES=20 scripts/launch/slurm-racks.sh && says "wanted whole racks of 18" &&
        refuses EP=5 scripts/launch/slurm-racks.sh && says "found EP=5" &&
        refuses EP=0 scripts/launch/slurm-racks.sh && says "found EP=0" &&
        refuses PROGRAM=absent scripts/launch/slurm-node.sh && says "found no program absent" &&
        refuses DRY_RUN=1 scripts/launch/slurm-rack.sh --preset moonlight-mini # 64 experts on 72 ranks
}

refuses_what_is_no_number_or_not_there() {
    refuses EP=x scripts/launch/slurm-rack.sh && says "found EP=x, wanted a whole number" &&
        refuses RACKS=two scripts/launch/slurm-racks.sh && says "found RACKS=two" &&
        refuses RANKS=08 scripts/launch/mpirun.sh && says "found RANKS=08" &&
        refuses PROGRAM=scripts scripts/launch/slurm-node.sh && says "found no program scripts" &&
        refuses RANKS=2 MPIRUN=absent-mpirun scripts/launch/mpirun.sh && says "found no absent-mpirun"
}

# Any DRY_RUN but 0 starts nothing, and what it shows can be given to a shell.
dry_runs_start_nothing() {
    launch DRY_RUN=yes RANKS=2 scripts/launch/mpirun.sh --preset unit-12 --out "a b" && ! says started: &&
        says 'unit-12 --out a\ b'
}

headers_say_what_was_tried() {
    for script in scripts/launch/*.sh; do
        echo "$script"
        grep -q -e "^# Not tried" -e "^# Not run" "$script" && [ -x "$script" ] || return 1
    done
}

lint() {
    command -v shellcheck >/dev/null || { echo "found no shellcheck" && return 0; }
    shellcheck -x scripts/launch/*.sh scripts/launch/common.bash tests/test_launch_scripts.sh
}

check "a node is planned" plans_a_node
check "a rack is planned, in one group or several" plans_a_rack
check "several racks are planned" plans_racks
check "mpirun's layout is planned" plans_by_mpirun
check "srun gets its words and the program its flags" starts_by_srun
check "mpirun gets its words, and Open MPI leaves the threads their cores" starts_by_mpirun
check "layouts that do not fit are refused" refuses_layouts_that_do_not_fit
check "what is no number or not there is refused" refuses_what_is_no_number_or_not_there
check "dry runs start nothing" dry_runs_start_nothing
check "every script says what was tried" headers_say_what_was_tried
check "shellcheck has nothing to say" lint
