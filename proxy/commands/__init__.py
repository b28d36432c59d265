"""One module per command: `register` adds its arguments, `run` does it. A command talks to a person; the rooms do the work."""
