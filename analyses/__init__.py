"""One file per scientific question; the verb of the command line is the name of the file."""
