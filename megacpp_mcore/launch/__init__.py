"""Training with the stock scripts: the launcher, and what it does in each process before a script runs."""
