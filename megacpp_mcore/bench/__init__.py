"""Benchmarks of every op and layer (``megacpp-mcore bench``); nothing here imports torch before one is run.

:mod:`~.catalog` lists them with their sizes, :mod:`~.cases` defines what each compares, built from the parts in
:mod:`~.problem`, which judges parity. :mod:`~.measure` times the correct variants; :mod:`~.csv_table` holds their rows.
"""
