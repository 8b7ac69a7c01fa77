"""Runtime: processes, devices, seeds, signals, faults and files. Its modules are its face.

- `distributed`: one process per device: `join_world`, `World` and its collectives
- `launch`: starts the processes of a run, restarts them, and returns the exit code
- `consensus`: ranks agree on a signal or a save after the same step
- `out_of_memory`: halves the micro-batch after running out of memory
- `signals`: SIGTERM, Ctrl-C and others end a run after its step
- `seeding`: random numbers decided by seed, epoch and index
- `machine`: cores, memory and accelerators that the container offers
- `platform`: what macOS or Windows lack: locks, signals, forks, kinds of memory
- `phases`: the phases of a step, as a profiler shows them
- `run_dir`: the run folder, its lock, and what is known about the environment
- `files`: files written whole or not at all; safe reading of damaged ones
- `console`: printing that cannot fail; progress; names from outside made printable
- `config_dict`: a config as a flat dict, and as words of a command line
- `command_line`: words to options, with help from comments and suggestions for typos
"""
