"""Comparing arms: matched runs in pairs, their statistics and verdict. `model.py` has the words, `plan.py` the plan,
`conductor.py` runs it, `document.py` sums it up."""
