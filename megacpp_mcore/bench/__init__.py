"""Benchmarks of every op and layer (``megacpp-mcore bench``); nothing here imports torch before one is run.

:mod:`~.registry` lists them with their sizes, :mod:`~.cases` defines what each compares, built from the parts in
:mod:`~.problem`. :mod:`~.runner` checks each variant with :mod:`~.parity`, times the correct ones with :mod:`~.measure`, and
fills the :mod:`~.table`, which :mod:`~.against` compares with a committed one.
"""
