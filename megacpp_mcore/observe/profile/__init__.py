"""Where the time of a few steps goes, by block family and phase."""
