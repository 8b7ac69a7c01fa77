"""How many workers decode fast enough on this machine, for `--data.workers auto`."""
