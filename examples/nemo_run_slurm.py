"""Trains NAM56R on a Slurm cluster through nemo-run, from Python, on its login node.

    python examples/nemo_run_slurm.py --account ME --python PYTHON --data DATA [--dry-run] [KEY=VALUE …]

Run it in an environment with nemo-run (``make nemo-run``). PYTHON and DATA are paths as seen by the nodes: the Python with
Megatron-Bridge and this package, or ``python`` in a container, and the prefix of a prepared dataset. NEMORUN_HOME names the
folder of scripts and logs, which the nodes must be able to access. The job is submitted without waiting for it; ``--dry-run``
prints its script instead. From another machine, pass the executor an ``SSHTunnel``.
"""

import argparse

import nemo_run as run

from megacpp_mcore.nemo_recipes import nemo_run


def executor(options: argparse.Namespace) -> run.SlurmExecutor:
    """One torchrun per node, with all of the node's GPUs; no file of this folder is packaged for the job."""
    return run.SlurmExecutor(
        account=options.account,
        partition=options.partition,
        time=options.time,
        nodes=options.nodes,
        ntasks_per_node=1,
        gpus_per_node=options.gpus_per_node,
        container_image=options.container,
        packager=run.Packager(),
    )


def main() -> None:
    """Submit the job, or print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="nam56r", help="a recipe, or a model")
    parser.add_argument("--account", required=True)
    parser.add_argument("--partition")
    parser.add_argument("--time", default="04:00:00")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--container", help="an image for Pyxis")
    parser.add_argument("--python", default="python")
    parser.add_argument("--data", required=True)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_intermixed_args()
    overrides = [f"dataset.data_path={options.data}", *options.overrides]
    name, script, slurm = nemo_run.plan(options.recipe, options.python, overrides, executor(options))
    with run.Experiment(name) as experiment:
        experiment.add(script, executor=slurm, name=name)
        if options.dry_run:
            experiment.dryrun()
        else:
            experiment.run(detach=True)


if __name__ == "__main__":
    main()
