"""Trains nam56r_tiny on this machine through nemo-run, from Python.

    python examples/nemo_run_local.py PYTHON DATA [KEY=VALUE …]

Run it in an environment with nemo-run (``make nemo-run``). PYTHON is the Python with Megatron-Bridge (``make bridge``), DATA
the prefix of a prepared dataset. The command ``nemo megacpp pretrain`` does the same.
"""

import sys

import nemo_run as run

from megacpp_mcore.nemo_recipes import nemo_run


def main() -> None:
    """Start the job, show its log, and fail if the job fails."""
    python, data, *overrides = sys.argv[1:]
    name, script, executor = nemo_run.plan("nam56r_tiny", python, [f"dataset.data_path={data}", *overrides])
    with run.Experiment(name) as experiment:
        experiment.add(script, executor=executor, name=name, tail_logs=True)
        experiment.run()
    nemo_run.check_ended_well(experiment)


if __name__ == "__main__":
    main()
