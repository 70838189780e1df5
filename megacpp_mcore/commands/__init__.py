"""The command line ``megacpp-mcore``, a module a sub-command."""
