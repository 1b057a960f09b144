"""The three ways in which polarprune reaches into torch, each in one module.

In: functions, modules and classes of torch or of the user. Out: context managers and small
functions that patch torch's globals (`patches`), replace the class of a module (`class_swaps`) or
attach an attribute to an object and read it (`markers`). Only this package may do so; every patch
is undone on every path, also after an exception.
"""
