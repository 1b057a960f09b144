"""The command line.

In: arguments of a terminal. Out: printed tables and files. It may import everything else; nothing
imports it.
"""
