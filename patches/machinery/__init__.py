"""How the patches in the folder above, a file each, are checked, applied, reverted and put into a checkout."""
