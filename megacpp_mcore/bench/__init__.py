"""Benchmarks of every op and layer: one registry, one runner, one table (``megacpp-mcore bench``).

=====================  ===============================================================================================
module                 what it has
=====================  ===============================================================================================
:mod:`~.registry`      every benchmark by name, with its shapes
:mod:`~.cases`         what each of them compares
:mod:`~.problem`       what a benchmark is made of: inputs, variants, floors, goals
:mod:`~.parity`        whether a variant computes the right thing
:mod:`~.runner`        checks, times, and fills the table
:mod:`~.table`         the columns of the table, and how it is printed
:mod:`~.against`       new rows against those of a committed table
:mod:`~.evidence`      why ``auto`` prefers a backend: committed rows, or a policy
:mod:`~.measure`       times, peak memory, versions, CSV files; also for the scripts in ``experiments/``
=====================  ===============================================================================================

Nothing here imports torch before a benchmark is run.
"""
