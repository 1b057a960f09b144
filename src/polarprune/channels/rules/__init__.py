"""What each operation does to channel labels.

One function for each kind of operation, and one table from operation to function (`table`). An
operation without a rule freezes the channels that it touches. Users add rules of their own with
`rules={…}`; `polarprune.rules` has what they need.
"""
