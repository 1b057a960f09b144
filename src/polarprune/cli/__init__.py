"""The command line: commands of the library, of the experiments, and the demonstration.

In: the arguments of a terminal command. Out: printed tables and files. It may import every other
package; no other package imports it.
"""
