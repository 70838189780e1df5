"""How the patches in the parent folder, one per file, are checked, applied, reverted and installed in a checkout."""
