"""M²RNN (arXiv 2603.14360): the reference of the matrix-state recurrence of an R layer."""
