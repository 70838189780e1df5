"""Benchmarks of every op and layer (``megacpp-mcore bench``); nothing here imports torch before one is run.

:mod:`~.registry` names them with their sizes, :mod:`~.cases` has what each compares, built of the parts of :mod:`~.problem`.
:mod:`~.runner` asks :mod:`~.parity` about each variant, has :mod:`~.measure` time those that are right, and fills the
:mod:`~.table`, which :mod:`~.against` compares with a committed one.
"""
