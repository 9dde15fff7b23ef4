"""Real launches, with real launchers, processes and gloo ranks on CPU.

`user` is a user's folder: a ZeRO-3 script that stock DeepSpeed cannot run, and that does nothing
about patches. Each test copies it, runs a line of docs/launchers.md there, and reads the report
that every rank leaves at its end. Launching costs seconds, so one launch shows many things.

`remote` stands in for the ssh between hosts: each of them is this machine.
"""
