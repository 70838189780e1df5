"""M²RNN (arXiv 2603.14360): the matrix-state recurrence of an R layer, between its projections."""
