"""The command `bench`: what each performance tip gains on this machine, measured in turns."""
