"""Whole-model measurements: :mod:`experiments.train` trains the arms of a YAML file side by side and reads their receipts."""
