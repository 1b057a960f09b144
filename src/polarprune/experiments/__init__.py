"""The paper's experiments and the methods that polarprune is compared with.

In: data sets on disk and an experiment's settings. Out: trained networks, logs and cards. It
trains models and writes into the folder of a run. The library itself needs none of this.
"""
