"""The paper's experiments and the methods that polarprune is compared with.

In: data sets on disk and the settings of an experiment. Out: trained and pruned networks, logs and
cards. It trains models and writes into the folder of a run. The library itself needs none of this.

`settings` and `presets` hold every number of an experiment. The packages build on each other in
this order: `data`, `networks`, `methods`, `runs`.
"""
