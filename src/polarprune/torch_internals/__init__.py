"""The ways in which polarprune reaches into torch and into users' modules, each in one module.

In: functions, modules and classes of torch or of the user. Out: context managers and small
functions that patch torch's globals (`patches`), change a setting that holds for the process
(`process_settings`), replace the class of a module (`class_swaps`), attach a mark to an object and
read it (`markers`), disable a method of a module (`refused_methods`), keep encoders off their fused
kernels (`fused_encoders`), or reach into torch's wrappers for several processes (`parallel`). Only
this package may do so; every patch and setting is undone on every path, also after an exception.
"""
