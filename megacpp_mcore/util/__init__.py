"""What every part of the package uses and no part owns: files, flags, type checks, nearest names. Standard library only."""
