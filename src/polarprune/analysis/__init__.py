"""The public `trace`: inspect a model, try a cut, repair, until every prunable group is confirmed.

In: a model, example inputs and the user's settings. Out: a `Graph` whose prunable groups were cut
in a trial and found exact. It runs copies of the model and changes nothing.
"""
