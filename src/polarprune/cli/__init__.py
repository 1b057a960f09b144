"""The command line of polarprune, and the demonstration that it runs.

In: the arguments of a terminal command. Out: printed tables and files. It may import every other
package; no other package imports it. `entry` starts it, `app` lists the commands, and the
experiments are imported only when a command needs them (`lazy`).
"""
