"""The methods that polarprune is compared with, one module for each family.

In: a model, an example input, settings and a budget. Out: penalties and gradients for the training
steps and, at the end, a smaller model. It changes the model that it is given.
"""
