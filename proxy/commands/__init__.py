"""The command line, one module per command: `register` adds its arguments, `run` executes it.

Commands only parse arguments and print results; other packages do the work.
"""
